"""Around which number initial values lie, and how far from it, where too few tell a distribution.

A few hundred numbers tell their mean and their deviation. Where another kind of tensor of the model should have both,
it is that kind's rule by which they may have been drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.distributions import NORMAL, compare_deviations, measure_kurtosis
from moeverify.diagnose.families import family_of
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.initial_values import Spread

_FEWEST, _FEWEST_OF_ONE = 64, 4
_LIKELY = 1e-4
_NEAR, _FAR = 3.0, 6.0
"""Standard errors within which two spreads are one, and beyond which they are two."""

_APART = 1.5
"""By how many times the deviations of other kinds must differ, so that those which are alike are no chance."""

_WHOLE = (0.0, 1.0)
_MOST_LIKE = 2


@dataclass(frozen=True)
class _Measured:
    """Mean and deviation of `count` numbers, with their standard errors."""

    mean: float
    deviation: float
    error: float
    relative: float

    @classmethod
    def of(cls, values: Tensor) -> _Measured:
        """Return those of values (n)."""
        mean, deviation, count = float(values.mean()), float(values.std()), len(values)
        kurtosis = measure_kurtosis(values - mean) if deviation > 0.0 else NORMAL
        relative = math.sqrt(max(kurtosis - 1.0, 0.5) / (4.0 * count))
        return cls(mean, deviation, deviation / math.sqrt(count), relative)

    def is_near(self, other: _Measured, times: float) -> bool:
        """Return whether two may be of one distribution, by so many standard errors."""
        if not self.deviation > 0.0 or not other.deviation > 0.0:
            return False
        apart = abs(math.log(self.deviation / other.deviation))
        return (
            abs(self.mean - other.mean) <= times * math.hypot(self.error, other.error)
            and apart <= times * math.hypot(self.relative, other.relative)
        )  # fmt: skip


def find_spreads(
    tensors: Sequence[WrongTensor], right: Mapping[str, Tensor]
) -> list[tuple[list[WrongTensor], Spread]]:
    """Return biases, and other vectors, if they all have one mean and deviation, which are not the right ones.

    `right` are the initial values of all parameters. Matrices have enough numbers to tell more.
    """
    groups: dict[bool, list[WrongTensor]] = {}
    for tensor in tensors:
        is_vector = tensor.expected.ndim == 1 and tensor.expected.numel() >= _FEWEST_OF_ONE
        if is_vector and bool(tensor.whole.isfinite().all()):
            groups.setdefault(tensor.name.endswith("bias"), []).append(tensor)
    found = [(members, _measure(members, right)) for members in groups.values()]
    return [(members, spread) for members, spread in found if spread is not None]


def _measure(members: Sequence[WrongTensor], right: Mapping[str, Tensor]) -> Spread | None:
    actual = [tensor.whole.reshape(-1) for tensor in members]
    together = torch.cat(actual)
    found, wanted = _Measured.of(together), _Measured.of(torch.cat([t.expected.reshape(-1) for t in members]))
    if len(together) < _FEWEST or not found.deviation > 0.0 or found.is_near(wanted, _FAR):
        return None
    ratios = [float((each - found.mean).square().mean().sqrt()) / found.deviation for each in actual]
    counts = [len(each) for each in actual]
    means = [abs(float(each.mean()) - found.mean) * math.sqrt(len(each)) for each in actual]
    kurtosis = max(measure_kurtosis(together - found.mean), 1.5)
    if compare_deviations(ratios, counts, kurtosis) <= _LIKELY or max(means) > _FAR * found.deviation:
        return None
    like = _list_like(found, {tensor.name for tensor in members}, right)
    return Spread(
        mean=_settle(found),
        deviation=found.deviation,
        right_mean=_settle(wanted),
        right_deviation=wanted.deviation,
        like=tuple(like[:_MOST_LIKE]),
        num_like=len(like),
    )


def _list_like(found: _Measured, names: set[str], right: Mapping[str, Tensor]) -> list[str]:
    """Return the kinds of other tensors that should have this mean and deviation; none where more come near."""
    kinds: dict[str, list[Tensor]] = {}
    for name, value in right.items():
        if name not in names:
            kinds.setdefault(family_of(name), []).append(value.double().reshape(-1))
    like = []
    for kind, values in kinds.items():
        other = _Measured.of(torch.cat(values)) if sum(map(len, values)) >= _FEWEST else None
        if other is None or abs(other.mean - found.mean) > _FAR * math.hypot(other.error, found.error):
            continue
        if found.is_near(other, _NEAR):
            like.append(kind)
        elif max(found.deviation, other.deviation) < _APART * min(found.deviation, other.deviation):
            return []
    return like


def _settle(measured: _Measured) -> float:
    """Return the mean, or the whole number that it may be."""
    whole = [number for number in _WHOLE if abs(measured.mean - number) <= _NEAR * measured.error]
    return whole[0] if len(whole) == 1 else measured.mean
