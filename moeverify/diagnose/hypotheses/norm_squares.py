"""Hypothesis: in the sum of squares of a norm some parameters count more often than once, or not at all.

The gradients are right, so the squares of all of them are known, and the squared norm is their sum. A norm that is
off by (k - 1) times the squares of one group of parameters has counted these k times. Groups are taken from simple to
complex: what an axis replicates or shards, then one family of parameters, then one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.families import family_of
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replicas import sum_of_squares_explains
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.factor import Factor, Product, is_same
from moeverify.results.observation import Observation, RankValues, ScalarValues
from moeverify.results.operation import Scaled, Unreduced
from moeverify.results.part import Contribution, Group, Part
from moeverify.results.trial import Reason

# How exactly the count of a group must be a whole number: the squared norm is known to 1e-14 of itself, and a group
# whose squares are less than 1e-5 of it leaves fewer digits, so it is not looked at.
_WHOLE, _LEAST_SHARE = 1e-6, 1e-5


class NormSquares(Hypothesis):
    """One group of parameters is counted k times, k a whole number; or the ranks' squares add up to the right one."""

    name = "norm_squares"
    quantities = frozenset({Quantity.GRADIENT_NORM})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Try the sum over every axis, then every group."""
        (tensor,) = tensors
        worst = tensor.worst_shard
        expected, actual = float(tensor.expected) ** 2, float(worst.values()) ** 2
        values = sorted({float(shard.values()) for shard in tensor.shards if shard.local is not None})
        seen: list[Observation] = [ScalarValues(expected=expected**0.5, actual=actual**0.5, rank=worst.rank)]
        if len(values) > 1:
            seen.append(RankValues(values=tuple(values)))
        unreduced = _find_axis(tensor, inputs)
        if unreduced is not None:
            return self.accept(explain_by(Cause.NORM, unreduced, tensors, inputs), *seen)
        squares = _measure_squares(inputs)
        total = sum(squares.values())
        if not squares or not is_same(total, expected):
            return self.untried(Reason.NO_SUCH_PARTS)
        explanation = _find_group(tensor, actual - expected, squares, inputs)
        return self.refuse(*seen) if explanation is None else self.accept(explanation, *seen)


def _find_axis(tensor: WrongTensor, inputs: DiagnosisInputs) -> Unreduced | None:
    """Return the axes over which the squares of what the ranks have add up to the expected square."""
    found = [axis for axis, groups in inputs.axes.groups.items() if sum_of_squares_explains(tensor, groups)]
    if not found:
        return None
    size = max(map(len, inputs.axes.groups[found[0]]))
    products = tuple(Product(times=(axis,)) for axis in found)
    return Unreduced(axes=products, num_replicas=size, factor=Factor(value=1.0))


def _measure_squares(inputs: DiagnosisInputs) -> dict[str, float]:
    """Return the squared norm of the golden's gradient of each parameter."""
    squares: dict[str, float] = {}
    for name in inputs.regions:
        gradient = inputs.golden(Kind.GRADIENT, name, 0)
        if gradient is not None:
            squares[name] = float(gradient.double().square().sum())
    return squares


def _find_group(
    tensor: WrongTensor, excess: float, squares: Mapping[str, float], inputs: DiagnosisInputs
) -> Explanation | None:
    total = sum(squares.values())
    sources = list(inputs.axes.sources)
    # A count above the number of ranks is no count of copies, and with enough of them any number is one.
    most = max((source.size for source in sources), default=1)
    for group in _list_groups(squares, inputs):
        square = sum(squares[name] for name in group.tensors)
        if square < _LEAST_SHARE * total:
            continue
        count = 1.0 + excess / square
        if round(count) == 1 or not 0 <= round(count) <= most or abs(count - round(count)) > _WHOLE:
            continue
        # The axis that makes the group was tested; another one of its size makes another group, which does not fit.
        tested = [source for source in sources if source.name == group.axis]
        factor = find_factor(float(round(count)), tested)
        factor = factor if factor.equals else find_factor(float(round(count)), sources)
        operation = Scaled(contributions=(Contribution(part=Part(group=group), factor=factor),))
        return explain_by(Cause.NORM, operation, [tensor], inputs)
    return None


def _list_groups(squares: Mapping[str, float], inputs: DiagnosisInputs) -> Iterator[Group]:
    """Yield the groups of parameters that have something in common, those of an axis first."""
    for axis, ranks in inputs.axes.groups.items():
        replicated = [name for name in squares if _is_replicated(name, ranks, inputs)]
        sharded = [name for name in squares if name not in replicated]
        if replicated and sharded:
            yield Group(tensors=tuple(replicated), axis=axis, placement="replicated")
            yield Group(tensors=tuple(sharded), axis=axis, placement="sharded")
    families: dict[str, list[str]] = {}
    for name in squares:
        families.setdefault(family_of(name), []).append(name)
    yield from (Group(tensors=tuple(names)) for names in families.values())
    yield from (Group(tensors=(name,)) for names in families.values() if len(names) > 1 for name in names)


def _is_replicated(name: str, groups: Sequence[Sequence[int]], inputs: DiagnosisInputs) -> bool:
    """Return whether all ranks of each group that hold a parameter hold the same part of it."""
    regions = inputs.regions[name]
    parts = [[regions[rank].key for rank in group if rank in regions] for group in groups]
    return any(len(part) > 1 for part in parts) and all(len(set(part)) <= 1 for part in parts)


HYPOTHESIS = NormSquares()
