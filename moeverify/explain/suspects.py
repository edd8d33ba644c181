"""Wrong results, and the operators between right values and them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.compare import TOLERANCE, is_right, relative_error
from moeverify.explain.joint import At, Joint
from moeverify.explain.program import Mark, Program, Shown
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind

_MANY = 16
"""Minimum number of distinct absolute values of a tensor for its match to prove a repair."""

_LATER_KINDS = (Kind.GRADIENT, Kind.GRADIENT_NORM, Kind.OPTIMIZER_STATE)
"""Kinds of results after the forward pass, each computed from the previous ones."""

_AFTER_STEP = (Kind.UPDATE, Kind.WEIGHT, Kind.BUFFER)

STATES = (Kind.WEIGHT, Kind.BUFFER, Kind.OPTIMIZER_STATE)
"""Kinds of tensors that have memory of their own from step to step."""


@dataclass(frozen=True)
class Target:
    """A tensor that the training loop shows: its value, right data and region on each rank."""

    mark: Mark
    values: dict[int, At]
    right: dict[int, Tensor]
    regions: dict[int, Region]

    def tells(self) -> bool:
        """Return whether a match proves a repair: tensors with few distinct values may match by chance."""
        sizes = [(data.numel(), len(set(data.abs().reshape(-1).tolist()))) for data in self.right.values()]
        return all(total == 1 or 2 * found > total or found >= _MANY for total, found in sizes)


def find_targets(
    joint: Joint, one: Program, step: int, tolerance: float = TOLERANCE
) -> tuple[list[Target], list[Target]]:
    """Return (wrong, right) tensors that are shown in a step, compared with the single device.

    `tolerance` is the largest relative error of right ones. Both are in program order. A wrong target has only the
    ranks on which it differs. A rank that holds several parts of a tensor has one target for each.
    """
    wrong, right = [], []
    for mark, shown in one.marks.items():
        whole = None if shown[-1].value is None else one.values[shown[-1].value].data
        if mark[0] != step or whole is None:
            continue
        for parts in itertools.zip_longest(*(program.marks.get(mark, ()) for program in joint.programs)):
            found = _compare(mark, parts, joint, whole, tolerance)
            if found[False].values:
                wrong.append(found[False])
            elif found[True].values:
                right.append(found[True])
    return wrong, right


def _compare(
    mark: Mark, parts: Sequence[Shown | None], joint: Joint, whole: Tensor, tolerance: float
) -> dict[bool, Target]:
    """Return the target of the ranks whose parts are wrong, by False, and the one of the others, by True."""
    found: dict[bool, Target] = {True: Target(mark, {}, {}, {}), False: Target(mark, {}, {}, {})}
    for rank, own in enumerate(parts):
        at = (rank, -1 if own is None or own.value is None else own.value)
        if own is None or at[1] < 0 or (actual := joint.data(at)) is None:
            continue
        if math.prod(own.region.shape) != whole.numel():
            continue  # another number of values, such as choices of experts: later results show the error
        expected = own.region.take(whole.reshape(own.region.shape))
        target = found[is_right(actual, expected, tolerance)]
        target.values[rank], target.right[rank], target.regions[rank] = at, expected, own.region
    return found


def list_independent(joint: Joint, right: Sequence[Target], wrong: Sequence[Target]) -> list[Target]:
    """Return the right results that are not computed from wrong ones.

    The others say nothing about a repair: Adam's first update is the rate, whatever the size of the gradient.
    """
    found: set[At] = set()
    waiting = [at for target in wrong for at in target.values.values()]
    while waiting:
        at = waiting.pop()
        for user in joint.users.get(at, ()):
            if user not in found:
                found.update(joint.members(user))
                waiting += [each for op in joint.members(user) for each in joint.results(op)]
    return [target for target in right if not any(joint.maker(at) in found for at in target.values.values())]


def list_unknown(alignment: Alignment, targets: list[At]) -> list[At]:
    """Return the operators between right values and targets, in program order."""
    joint = alignment.joint
    found: set[At] = set()
    waiting = [joint.maker(at) for at in targets]
    while waiting:
        op = waiting.pop()
        if op in found:
            continue
        found.update(joint.members(op))
        for source in joint.needs(op):
            if not alignment.is_right(source):
                waiting.append(joint.maker(source))
    return sorted(found, key=joint.place)


def is_target_right(data: Tensor, target: Target, rank: int) -> bool:
    """Return whether data equal a target's right data on a rank, or the whole tensor around them."""
    return measure_target(data, target, rank) <= TOLERANCE


def measure_target(data: Tensor | None, target: Target, rank: int) -> float:
    """Return the relative error of data, or of a target's region in them; infinite for other sizes."""
    right, region = target.right[rank], target.regions[rank]
    if data is not None and data.numel() == right.numel():
        return relative_error(data, right)
    if data is None or data.numel() != math.prod(region.shape):
        return math.inf
    return relative_error(region.take(data.reshape(region.shape)), right)


def order_of(target: Target) -> int:
    """Return a sort key for the part of a step that computes a result."""
    kind = target.mark[1]
    if kind in _AFTER_STEP:
        return len(_LATER_KINDS) + 1
    return _LATER_KINDS.index(kind) + 1 if kind in _LATER_KINDS else 0


def list_reached(programs: Sequence[Program], step: int) -> frozenset[str]:
    """Return the parameters of which the backward pass of a step computes a gradient that is not zero.

    The derivative of an operator of two inputs has a gradient for each, so that none of its shape may be zero.
    """
    found: set[str] = set()
    for program in programs:
        reached: dict[tuple[int, str], bool] = {}
        for op in program.ops:
            if (op.phase, op.step) != ("backward", step) or op.origin < 0:
                continue
            taken = [program.base(number) for number in program.ops[op.origin].reads()]
            for value in (program.values[number] for number in op.results):
                is_some = value.data is not None and bool(value.data.any())
                for key in ((op.origin, each.label) for each in taken if each.shape == value.shape):
                    reached[key] = reached.get(key, True) and is_some
        found.update(name for (_, name), is_some in reached.items() if name and is_some)
    return frozenset(found)
