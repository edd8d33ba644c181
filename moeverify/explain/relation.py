"""Relation of a wrong result to the right one: a multiple of it, a part of its sum, or its values elsewhere."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.compare import ROUNDING, TOLERANCE, is_right, relative_error
from moeverify.explain.joint import At, Execution
from moeverify.explain.program import Mark, Program
from moeverify.explain.suspects import STATES, Target
from moeverify.results.checks import Kind

Relation = Literal["", "scale", "reduction", "moved", "shared"]


def find_shared(alignment: Alignment, target: Target) -> str:
    """Return the name of a tensor whose memory a wrong state shares on each of its ranks, or an empty string.

    On one device, both have memory of their own.
    """
    programs, alone = alignment.joint.programs, alignment.one.marks[target.mark][-1].value
    found = [_list_shared(programs[rank], target.mark, at[1]) for rank, at in target.values.items()]
    apart = [] if alone is None else _list_shared(alignment.one, target.mark, alone)
    common = [each for each in found[0] if each not in apart and all(each in others for others in found)]
    return "/".join(common[0][1:]) if common else ""


def _list_shared(program: Program, mark: Mark, value: int) -> list[Mark]:
    """Return the other states of a step that have a value, if the mark is one of a state."""
    return [
        other
        for other, parts in program.marks.items()
        if other != mark and other[0] == mark[0] and {other[1], mark[1]} <= {*STATES}
        if any(shown.value == value for shown in parts)
    ]


def find_factor(alignment: Alignment, target: Target, state: Execution) -> float | None:
    """Return the factor if a result is the same multiple of the right one on all ranks, else None."""
    factors = []
    for rank, at in target.values.items():
        data, right = state.data(at), target.right[rank].reshape(-1).to(torch.float64)
        if data is None or data.numel() != right.numel():
            return None
        actual = data.reshape(-1).to(torch.float64)
        factor = float(actual @ right) / float(right @ right) if bool(right.any()) else 0.0
        if factor == 0.0 or not (
            is_right(actual, right * factor) or _is_rounded_multiple(alignment, at, right, factor)
        ):
            return None
        if data.numel() == 1 and not any(
            math.isclose(factor, scale, rel_tol=1e-9) for scale in alignment.scales
        ):
            return None  # any single number is a multiple of any other
        factors.append(factor)
    return factors[0] if max(factors) - min(factors) <= 1e-7 * abs(factors[0]) else None


def find_relation(alignment: Alignment, target: Target, factor: float | None) -> Relation:
    """Return the relation of a wrong result, a multiple by `factor` if it is not None, to single-device values."""
    if find_shared(alignment, target):
        return "shared"
    if factor is not None:
        return "scale"
    if _adds_up(alignment, target):
        return "reduction"
    found = [alignment.find(at) for at in target.values.values()]
    known = [each for each in found if each is not None and each.ids is not None]
    if len(known) < len(found):
        return ""
    if all(each.over for each in known):
        return "reduction"
    is_whole = not any(each.over or each.scale != 1.0 for each in known)
    return "moved" if is_whole and any(_has_moved(alignment, target, rank) for rank in target.values) else ""


def _has_moved(alignment: Alignment, target: Target, rank: int) -> bool:
    """Return whether a result has other numbers than the right ones somewhere, and not only zeros."""
    data, right = alignment.data(target.values[rank]), target.right[rank].reshape(-1)
    if data is None or data.numel() != len(right):
        return True
    actual = data.reshape(-1).to(right.dtype)
    tolerance = TOLERANCE * float(right.abs().max())
    return bool(((actual != 0) & ((actual - right).abs() > tolerance)).any())


def _is_rounded_multiple(alignment: Alignment, at: At, right: Tensor, factor: float) -> bool:
    """Return whether a multiple of a single-device value is one of the right value, up to float32 rounding."""
    known, data = alignment.find(at), alignment.data(at)
    is_multiple = known is not None and known.ids is not None and not known.over and known.scale != 1.0
    return is_multiple and data is not None and relative_error(data, right * factor) < ROUNDING


def _adds_up(alignment: Alignment, target: Target) -> bool:
    """Return whether replicas of a gradient, which all are wrong, add up to the right one."""
    regions = {region.key for region in target.regions.values()}
    parts = [alignment.data(at) for at in target.values.values()]
    data = [each.reshape(-1).to(torch.float64) for each in parts if each is not None]
    if target.mark[1] != Kind.GRADIENT or len(regions) != 1 or not 1 < len(data) == len(parts):
        return False
    return is_right(torch.stack(data).sum(0), next(iter(target.right.values())))
