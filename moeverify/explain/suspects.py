"""The stretch between right values and the first wrong result."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.compare import is_right
from moeverify.explain.joint import At, Joint
from moeverify.explain.program import Mark, Program
from moeverify.layout.region import Region

_MANY = 16
"""Being right proves something of a tensor with at least this many different absolute values."""


@dataclass(frozen=True)
class Target:
    """A wrong tensor that the training loop shows: its value on each rank, and the right data."""

    mark: Mark
    values: dict[int, At]
    right: dict[int, Tensor]
    regions: dict[int, Region]

    def tells(self) -> bool:
        """Return whether its right data prove a repair: tensors with few different numbers may be right by chance."""
        sizes = [(data.numel(), len(set(data.abs().reshape(-1).tolist()))) for data in self.right.values()]
        return all(total == 1 or 2 * found > total or found >= _MANY for total, found in sizes)


def find_targets(joint: Joint, one: Program, step: int) -> tuple[list[Target], list[Target]]:
    """Return the tensors shown in a step that differ from those of one device, and those that do not.

    They are in program order; a target that differs has only the ranks on which it differs.
    """
    wrong, right = [], []
    for mark, shown in one.marks.items():
        whole = None if shown.value is None else one.values[shown.value].data
        if mark[0] != step or whole is None:
            continue
        found: dict[bool, Target] = {True: Target(mark, {}, {}, {}), False: Target(mark, {}, {}, {})}
        for rank, program in enumerate(joint.programs):
            own = program.marks.get(mark)
            actual = None if own is None or own.value is None else program.values[own.value].data
            if own is None or own.value is None or actual is None:
                continue
            expected = own.region.take(whole.reshape(own.region.shape))
            target = found[is_right(actual, expected)]
            target.values[rank] = (rank, own.value)
            target.right[rank] = expected
            target.regions[rank] = own.region
        if found[False].values:
            wrong.append(found[False])
        elif found[True].values:
            right.append(found[True])
    return wrong, right


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
    """Return whether data are the right data of a target on a rank, or a tensor that these are a part of."""
    right, region = target.right[rank], target.regions[rank]
    if data.numel() == right.numel():
        return is_right(data, right)
    if data.numel() != math.prod(region.shape):
        return False
    return is_right(region.take(data.reshape(region.shape)), right)
