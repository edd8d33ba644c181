"""Expert weight gradients by one product for the rows of several micro-batches.

When an expert has few rows per micro-batch, the product for its weight gradient is bound by writing the
result. So is the following sum over micro-batches. Here the rows and their gradients are kept for several
micro-batches, and the last one computes the summed weight gradient in one product. It rounds the total once
instead of the sum of each micro-batch.

Notation: M rows of a micro-batch, sorted by expert, m micro-batches, E experts, F and H the dims of their
matrices.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from moeverify.model.expert_backends.grouped_mm import multiply_grouped, swiglu_grouped
from moeverify.model.experts import Experts
from moeverify.parallel.ddp import Accumulate
from moeverify.parallel.padded_dispatcher import order_by_expert
from moeverify.seams import seam


class GradientOperands(NamedTuple):
    """Operands of a weight gradient: rows (M, H), gradients (M, F) of their products, and ends (E) int32.

    Rows of expert e end at `ends[e]`. Rows after the last end belong to no expert.
    """

    rows: Tensor
    grads: Tensor
    ends: Tensor


@dataclass
class JoinedGradients:
    """Counter of the micro-batches of a step, in runs of `joined`.

    The last micro-batch of a run computes the weight gradients of the whole run.
    """

    joined: int
    is_last: bool = True
    _number: int = 0

    def surround(self, accumulate: Accumulate) -> Accumulate:
        """Return the context of a micro-batch that also counts it."""

        def micro_batch(last: bool) -> AbstractContextManager[object]:
            self._number = (self._number + 1) % self.joined
            self.is_last = last or self._number == 0
            if last:
                self._number = 0
            return accumulate(last)

        return micro_batch


@dataclass
class _Kept:
    """Rows of micro-batches whose weight gradient is pending, for one matrix per expert."""

    together: JoinedGradients
    passes: list[GradientOperands] = field(default_factory=list)


@seam
def join_gradients(model: nn.Module, joined: int) -> JoinedGradients:
    """Make the experts of a model compute weight gradients of `joined` micro-batches at once.

    The experts must use grouped products.
    """
    together = JoinedGradients(joined)
    for module in model.modules():
        if isinstance(module, Experts):
            products = tuple(partial(_multiply, _Kept(together)) for _ in range(3))
            module.core = partial(swiglu_grouped, products=products)
    return together


def _multiply(kept: _Kept, rows: Tensor, matrix: Tensor, ends: Tensor) -> Tensor:
    # Detached, the matrix receives no gradient until the joined one is computed.
    used = matrix if kept.together.is_last else matrix.detach()
    product: Tensor = _Product.apply(rows, used, ends, kept)  # type: ignore[no-untyped-call]
    return product


class _Product(Function):
    """`multiply_grouped` whose backward keeps operands, or computes the gradient of all kept ones."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, ends: Tensor, kept: _Kept) -> Tensor:
        ctx.save_for_backward(rows, matrix, ends)
        ctx.kept = kept
        return multiply_grouped(rows, matrix, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, matrix, ends = ctx.saved_tensors
        grad, kept = grad.contiguous(), ctx.kept
        kept.passes.append(GradientOperands(rows, grad, ends))
        of_matrix = None
        if ctx.needs_input_grad[1]:
            of_matrix = sum_gradients(kept.passes)
            kept.passes = []
        return functional.grouped_mm(grad, matrix, offs=ends), of_matrix, None, None


@seam
def sum_gradients(passes: list[GradientOperands]) -> Tensor:
    """Return the sum (E, F, H) of the weight gradients of passes with equal numbers of rows."""
    if len(passes) == 1:
        ((rows, grads, ends),) = passes
        return functional.grouped_mm(grads.t(), rows, offs=ends)
    all_ends = torch.stack([each.ends for each in passes]).to(torch.int64)
    counts = all_ends.diff(dim=1, prepend=all_ends.new_zeros(len(passes), 1))  # (m, E)
    order, _ = order_by_expert(counts, len(passes[0].rows))
    rows = torch.cat([each.rows for each in passes]).index_select(0, order)
    grads = torch.cat([each.grads for each in passes]).index_select(0, order)
    return functional.grouped_mm(grads.t(), rows, offs=all_ends.sum(dim=0).to(torch.int32))
