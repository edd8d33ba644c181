"""Hypothesis: some slices along a dim lack shares of the batch, or weight them differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.components import Components
from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.fit import Column, fit_columns
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.hypotheses.linear_fit import knows
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.slices import make_block
from moeverify.explain.fitting.wrong_tensor import EXACT, RankShard, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import FitResult
from moeverify.results.operation import Scaled
from moeverify.results.part import Block, Contribution, Part
from moeverify.results.trial import Reason

_SAME = 1e-6  # relative, of equal weights


class BlockShares(Hypothesis):
    """A sum over ranks omits one of them for a part of a tensor, such as an expert, some heads or some rows.

    All wrong slices together are one combination of the shares of the loss ranks and micro-batches.
    """

    name = "block_shares"
    quantities = frozenset({Quantity.GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit the wrong slices along each dim that also has right slices."""
        (tensor,) = tensors
        components = inputs.components() if inputs.components is not None else None
        if components is None or not knows(components, tensors):
            return self.untried(Reason.NO_SUCH_PARTS)
        if not bool(torch.isfinite(tensor.whole).all()):
            return self.untried(Reason.NOT_COMPARABLE)
        tried = False
        for dim in range(tensor.expected.ndim):
            wrong = find_wrong_slices(tensor, dim)
            if not 0 < len(wrong) < tensor.expected.shape[dim]:
                continue
            block = make_block(tensor.name, dim, wrong)
            columns = list_shares(components, block)
            fit = fit_columns([narrow(tensor, block)], columns)
            tried = tried or fit is not None
            if fit is None or not fit.explains or _is_one_factor(fit.coefficients):
                continue
            fit = fit.settle([0.0, 1.0])
            # The weight of one share equals the size of an axis only by chance.
            contributions = tuple(
                Contribution(part=part, factor=find_factor(value, []))
                for part, value in zip(fit.parts, fit.coefficients, strict=True)
            )
            off = tuple(each for each in contributions if not each.is_right) or contributions
            explanation = explain_by(
                Cause.SHARE_WEIGHTS, Scaled(contributions=off), tensors, inputs, residual=fit.residual
            )
            return self.accept(
                explanation,
                FitResult(contributions=contributions, residual=fit.residual),
                contributions=contributions,
            )
        return self.refuse() if tried else self.untried(Reason.TOO_FEW_NUMBERS)


def _is_one_factor(coefficients: Sequence[float]) -> bool:
    """Return whether all shares have the same weight: the slices are scaled, and no share is missing."""
    return max(coefficients) - min(coefficients) <= _SAME * max(map(abs, coefficients))


def list_shares(components: Components, block: Block) -> list[Column]:
    """Return the shares of the loss ranks and micro-batches, restricted to a block."""
    return [
        (
            Part(tokens=cell.tokens, block=block),
            lambda name, number=number: take(components.share(number, name), block),  # type: ignore[misc]
        )
        for number, cell in enumerate(components.cells)
    ]


def find_wrong_slices(tensor: WrongTensor, dim: int) -> list[int]:
    """Return the indices along a dim at which the tensor differs from the golden."""
    count = tensor.expected.shape[dim]
    error = (tensor.whole - tensor.expected).movedim(dim, 0).reshape(count, -1).norm(dim=1)
    size = tensor.expected.movedim(dim, 0).reshape(count, -1).norm(dim=1)
    return [int(index) for index in (error > EXACT * torch.maximum(size, size.mean())).nonzero().flatten()]


def take(whole: Tensor, block: Block) -> Tensor:
    """Return the slices of a block."""
    return whole.index_select(block.dim, torch.tensor(block.indices))


def narrow(tensor: WrongTensor, block: Block) -> WrongTensor:
    """Return the slices of a block as a separate wrong tensor."""
    actual = take(tensor.whole, block)
    shards = (RankShard(0, Region.whole(actual.shape), actual),)
    return WrongTensor(tensor.key, take(tensor.expected, block), shards, tensor.precision)


HYPOTHESIS = BlockShares()
