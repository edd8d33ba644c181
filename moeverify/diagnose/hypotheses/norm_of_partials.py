"""Hypothesis: a norm is taken of what ranks have of some gradients before these are summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.families import name_family
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.reductions import find_factor_of_sum, list_meetings
from moeverify.diagnose.wrong_tensor import EXACT, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Product
from moeverify.results.observation import RankValues, ScalarValues
from moeverify.results.operation import NormOfPartials
from moeverify.results.trial import Reason

# The squared norm is known to 1e-14 of itself in float64. What is off by less than this share of it leaves fewer than
# four digits, in which a sum of squares could fit by chance.
_LEAST_EXCESS = 1e-10
_FITS = 1e-4
_Combination = Literal["norms", "squares", "own"]
_COMBINATIONS: tuple[_Combination, ...] = ("norms", "squares", "own")


@dataclass(frozen=True)
class _Summed:
    """The right square of a gradient, and by combination what it is of the ranks' parts of it."""

    name: str
    square: float
    combined: Mapping[_Combination, float]
    groups: tuple[tuple[int, ...], ...]


class NormOfPartialsHypothesis(Hypothesis):
    """What ranks brought to the all-reduces of gradients sums to the golden, and the norm is made of it.

    In float64 alone: a part of the gradients makes a small part of the norm.
    """

    name = "norm_of_partials"
    quantities = frozenset({Quantity.GRADIENT_NORM})
    generalizes = ("norm_squares",)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Replace the squares of all that were summed so, of those of a family, and of each alone."""
        (tensor,) = tensors
        if tensor.precision != torch.float64:
            return self.untried(Reason.NOT_COMPARABLE)
        worst = tensor.worst_shard
        summed = list(_list_summed(worst.rank, inputs))
        if not summed:
            return self.untried(Reason.NO_SUCH_PARTS)
        expected, actual = float(tensor.expected), float(worst.values())
        values = sorted({float(shard.values()) for shard in tensor.shards if shard.local is not None})
        seen = [ScalarValues(expected=expected, actual=actual, rank=worst.rank)]
        others = [RankValues(values=tuple(values))] if len(values) > 1 else []
        excess = actual**2 - expected**2
        if abs(excess) < _LEAST_EXCESS * expected**2:
            return self.refuse(*seen)
        for members in _list_groups(summed):
            common = [each for each in _COMBINATIONS if all(each in other.combined for other in members)]
            for combination in common:
                moved = sum(each.combined[combination] - each.square for each in members)
                if abs(moved - excess) <= _FITS * abs(excess):
                    operation = NormOfPartials(
                        combination=combination,
                        tensors=tuple(each.name for each in members),
                        axes=_find_axes(members, inputs),
                    )
                    return self.accept(explain_by(Cause.NORM, operation, tensors, inputs), *seen, *others)
        return self.refuse(*seen)


def _list_summed(rank: int, inputs: DiagnosisInputs) -> Iterator[_Summed]:
    """Yield the gradients of which it is known what ranks had before their sum; `own` is what this rank had."""
    for name, regions in inputs.regions.items():
        golden = inputs.golden(Kind.GRADIENT, name, 0)
        if golden is None:
            continue
        wanted = {each: region.take(golden).reshape(-1).to(torch.float64) for each, region in regions.items()}
        parts = _find_parts(wanted, inputs)
        if parts is None:
            continue
        own, groups = parts
        # Each region counts once, whichever ranks hold it too.
        first = {region.key: each for each, region in reversed(list(regions.items()))}
        of_groups = [[float(own[other].norm()) for other in groups[each]] for each in first.values()]
        combined: dict[_Combination, float] = {
            "norms": sum(sum(norms) ** 2 for norms in of_groups),
            "squares": sum(sum(norm**2 for norm in norms) for norms in of_groups),
        }
        if rank in own and len(first) == 1:
            combined["own"] = float(own[rank].norm()) ** 2
        yield _Summed(name, float(golden.double().square().sum()), combined, tuple(set(groups.values())))


def _find_parts(
    wanted: Mapping[int, Tensor], inputs: DiagnosisInputs
) -> tuple[dict[int, Tensor], dict[int, tuple[int, ...]]] | None:
    """Return what ranks brought to the all-reduce that made a right gradient, and the group of each rank."""
    for meeting in list_meetings(inputs.brought, {rank: each.numel() for rank, each in wanted.items()}):
        factor = find_factor_of_sum(meeting, wanted, EXACT)
        if factor is not None:
            own = {rank: factor * values for rank, values in meeting.values.items()}
            return own, {rank: record.group for rank, record in meeting.collectives.items()}
    return None


def _list_groups(summed: Sequence[_Summed]) -> Iterator[list[_Summed]]:
    """Yield all gradients, those whose sums are over the same ranks, those of a family, and each alone."""
    yield list(summed)
    keys: tuple[Callable[[_Summed], object], ...] = (
        lambda each: frozenset(each.groups),
        lambda each: name_family([each.name]),
        lambda each: each.name,
    )
    for key in keys:
        found: dict[object, list[_Summed]] = {}
        for each in summed:
            found.setdefault(key(each), []).append(each)
        yield from found.values()


def _find_axes(members: Sequence[_Summed], inputs: DiagnosisInputs) -> tuple[Product, ...]:
    """Return the axes whose groups are those of all these sums."""
    met = {tuple(sorted(group)) for each in members for group in each.groups}
    return tuple(
        Product(times=(axis,))
        for axis, groups in inputs.axes.groups.items()
        if met <= {tuple(sorted(group)) for group in groups}
    )


HYPOTHESIS = NormOfPartialsHypothesis()
