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


@dataclass(frozen=True)
class Target:
    """A tensor that the training loop shows and that differs: its value on each rank, and what that should be."""

    mark: Mark
    values: dict[int, At]
    right: dict[int, Tensor]
    regions: dict[int, Region]


def find_wrong(joint: Joint, one: Program, step: int) -> list[Target]:
    """Return the tensors shown in a step that differ from those of one device, in the order of the step."""
    found = []
    for mark, shown in one.marks.items():
        if mark[0] != step or shown.value is None or one.values[shown.value].data is None:
            continue
        whole = one.values[shown.value].data
        assert whole is not None
        values: dict[int, At] = {}
        right: dict[int, Tensor] = {}
        regions: dict[int, Region] = {}
        for rank, program in enumerate(joint.programs):
            own = program.marks.get(mark)
            if own is None or own.value is None:
                continue
            expected = own.region.take(whole.reshape(own.region.shape))
            actual = program.values[own.value].data
            if actual is not None and not is_right(actual, expected):
                values[rank] = (rank, own.value)
                right[rank] = expected
                regions[rank] = own.region
        if values:
            found.append(Target(mark, values, right, regions))
    return found


def list_unknown(alignment: Alignment, targets: list[At]) -> list[At]:
    """Return the operators by which targets are made of right values, in the order of the program."""
    joint = alignment.joint
    found: set[At] = set()
    waiting = [joint.maker(at) for at in targets]
    while waiting:
        op = waiting.pop()
        if op in found:
            continue
        found.update(joint.members(op))
        hidden = joint.hidden(op)
        for source in [*joint.reads(op), *([] if hidden is None else [hidden])]:
            if not alignment.is_right(source):
                waiting.append(joint.maker(source))
    return sorted(found, key=joint.place)


def is_target_right(data: Tensor, target: Target, rank: int) -> bool:
    """Return whether data are what a target should be on a rank, or the whole of which that is a part."""
    right, region = target.right[rank], target.regions[rank]
    if data.numel() == right.numel():
        return is_right(data, right)
    if data.numel() != math.prod(region.shape):
        return False
    return is_right(region.take(data.reshape(region.shape)), right)
