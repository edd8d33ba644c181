"""The routed SwiGLU experts: stacked weights, and one function for each way to multiply with them.

Letters: M token copies sorted by expert, E (local) experts, H hidden, F expert hidden (local).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeverify.errors import CaseError, Problem
from moeverify.model.param_access import View, identity
from moeverify.model.precision import Factory


class ExpertWeights(NamedTuple):
    """gate and up (E, F, H), down (E, H, F), gate_bias and up_bias (E, F), down_bias (E, H), or no biases."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


Backend = Callable[[Tensor, Tensor, ExpertWeights], Tensor]
"""x (M, H) sorted by expert, counts (E) int64 that sum to M, the weights in; outputs (M, H) out."""


def swiglu_loop(x: Tensor, counts: Tensor, weights: ExpertWeights) -> Tensor:
    """Return down_e(silu(gate_e(x)) * up_e(x)) for the rows of each expert e, one expert after the other.

    An expert without rows is computed too, so that its gradient is zero and not missing.

    Shapes: see `Backend`.
    """
    num_experts = len(weights.gate)
    # unbind, not indexing: its backward stacks, where that of E indexings adds up E tensors of full size.
    gates, ups, downs = weights.gate.unbind(), weights.up.unbind(), weights.down.unbind()
    gate_biases, up_biases, down_biases = (
        [None] * num_experts if bias is None else bias.unbind()
        for bias in (weights.gate_bias, weights.up_bias, weights.down_bias)
    )
    outputs = []
    for expert, rows in enumerate(torch.split(x, counts.tolist())):
        gated = functional.silu(functional.linear(rows, gates[expert], gate_biases[expert]))
        inner = gated * functional.linear(rows, ups[expert], up_biases[expert])
        outputs.append(functional.linear(inner, downs[expert], down_biases[expert]))
    return torch.cat(outputs)


def swiglu_grouped(x: Tensor, counts: Tensor, weights: ExpertWeights) -> Tensor:
    """Return what `swiglu_loop` does, with torch's grouped matrix product.

    Shapes: see `Backend`.
    Raises: CaseError for float64 and for rows that are no multiple of 16 bytes.
    """
    check_grouped(x.dtype, hidden=x.shape[-1], expert_hidden=weights.gate.shape[-2])
    offsets = counts.cumsum(0).to(torch.int32)
    owner = None if weights.gate_bias is None else _find_owner(counts, len(x))

    def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        product = functional.grouped_mm(rows, matrix.transpose(-2, -1), offs=offsets)
        return product if bias is None or owner is None else product + owner.to(bias.dtype) @ bias

    gated = functional.silu(multiply(x, weights.gate, weights.gate_bias))
    inner = gated * multiply(x, weights.up, weights.up_bias)
    return multiply(inner, weights.down, weights.down_bias)


def _find_owner(counts: Tensor, num_rows: int) -> Tensor:
    """Return the one-hot owner (M, E) of each row.

    The grouped product takes no bias yet. A product with the owner adds each row's own, and its backward sums
    in a fixed order where that of an index would use atomics.
    """
    experts = torch.arange(len(counts), device=counts.device)
    return experts.repeat_interleave(counts, output_size=num_rows).unsqueeze(-1) == experts


def check_grouped(dtype: torch.dtype, *, hidden: int, expert_hidden: int) -> None:
    """Raise CaseError with everything that keeps the grouped product from taking this dtype and sizes."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        message = f"grouped_mm cannot multiply {dtype} tensors"
        raise CaseError([Problem(message, path="layout.experts", remedy="use the loop backend")])
    step = 16 // dtype.itemsize
    sizes = {"hidden": hidden, "expert_hidden (local)": expert_hidden}
    problems = [
        Problem(
            f"grouped_mm needs {name} to be a multiple of {step} in {dtype}, not {size}",
            path="layout.experts",
            remedy="use the loop backend or another size",
        )
        for name, size in sizes.items()
        if size % step
    ]
    if problems:
        raise CaseError(problems)


class ExpertHolder(nn.Module):
    """A module all of whose parameters are experts' weights.

    `gradient_share` is what its backward pass multiplies their gradients with: 1 unless it averages by itself.
    """

    gradient_share: float = 1.0


BACKENDS: Mapping[str, Backend] = {"loop": swiglu_loop, "grouped_mm": swiglu_grouped}


class Experts(ExpertHolder):
    """The stacked weights of all routed experts that live here, multiplied by one of `BACKENDS`.

    `view` turns each stored parameter into the tensor to compute with, and the number of experts is read off
    it. Where several ranks hold shards of F and add their outputs, all but one set `add_down_bias` to False.
    """

    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self, num_experts: int, hidden: int, expert_hidden: int, *, bias: bool, backend: str, factory: Factory
    ) -> None:
        super().__init__()
        if backend == "grouped_mm":
            check_grouped(factory["dtype"], hidden=hidden, expert_hidden=expert_hidden)
        self.core: Backend = BACKENDS[backend]
        self.view: View = identity
        self.add_down_bias = True
        self.gate = nn.Parameter(torch.empty(num_experts, expert_hidden, hidden, **factory))
        self.up = nn.Parameter(torch.empty(num_experts, expert_hidden, hidden, **factory))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, expert_hidden, **factory))
        widths = {"gate_bias": expert_hidden, "up_bias": expert_hidden, "down_bias": hidden}
        for name, width in widths.items():
            value = nn.Parameter(torch.zeros(num_experts, width, **factory)) if bias else None
            self.register_parameter(name, value)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs (M, H) for x (M, H) sorted by expert, counts (E) rows for each."""
        return self.core(x, counts, self.collect_weights())

    def collect_weights(self) -> ExpertWeights:
        """Return the local tensors to compute with."""
        gate_bias, up_bias, down_bias = (
            None if bias is None else self.view(bias)
            for bias in (self.gate_bias, self.up_bias, self.down_bias)
        )
        if down_bias is not None and not self.add_down_bias:
            down_bias = down_bias * 0  # stays in the graph: its gradient here is zero, not missing
        return ExpertWeights(
            self.view(self.gate), self.view(self.up), self.view(self.down), gate_bias, up_bias, down_bias
        )
