"""The rotary embedding of heads, with a part of it otherwise: positions, angles, pairs, the elements that are turned.

Letters: b rows, s tokens, N heads, D width of a head, R of its part that is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.case.attention import Yarn
from moeverify.model.rope import compute_rotation
from moeverify.results.change import Change

GLOBAL, OWNER = "position", "owner"
PARTS = ("rotation", "query-rotation", "key-rotation")
_MOST_ANGLES = 16
_BASES = (1e2, 1e4, 1e6)
_POSITIONS = ("none", "place", "arrival", "opposite", "twice")
_PAIRS = ("neighbours", "halves", "first-half", "swapped", "mixed-pairs", "own-part-first", "whole")


@dataclass(frozen=True)
class Rotation:
    """How a module turns heads: the last `num_rotated` of `width` elements, in pairs of neighbours or of halves."""

    theta: float
    yarn: Yarn | None
    width: int
    num_rotated: int
    in_neighbours: bool

    def list_ways(self, lengths: Sequence[int], splits: Mapping[str, Tensor], num_ranks: int) -> list[Change]:
        """Return what may be otherwise; `splits` are positions of other splits by name, `lengths` may be cut to."""
        found = []
        for part in PARTS:
            found += [Change(part=part, way=way) for way in (*_POSITIONS, *_PAIRS)]
            found += [Change(part=part, way=way) for way in splits]
            found += [
                Change(part=part, way=way, number=number)
                for number in self._list_widths()
                for way in ("partial", "partial-last", "partial-frequencies")
            ]
            if num_ranks > 1:
                found += [Change(part=part, way="gap", number=number) for number in (1, -1)]
            if part != PARTS[0]:
                found += [Change(part=part, way="offset", number=number) for number in (1, -1)]
        for way in ("modulo", "restart", "clamped"):
            found += [
                Change(part=PARTS[0], way=way, number=number)
                for number in lengths
                if number > 1 or way == "restart"
            ]
        if self.yarn is not None:
            found.append(Change(part=PARTS[0], way="unstretched"))
        return found + [Change(part="value-rotation", way=way) for way in ("added", "opposite")]

    def list_backward(self) -> list[Change]:
        """Return how a right rotation may be undone otherwise in the backward pass."""
        ways = ("none", "opposite", "twice", "neighbours", "halves", "swapped", "first-half")
        return [Change(part="rotation-back", way=way) for way in ways]

    def list_fits(self) -> list[Change]:
        """Return what has a number that is not known."""
        found = [Change(part=PARTS[0], way="base", number=base) for base in _BASES]
        found += [Change(part=PARTS[0], way="interpolated", number=number) for number in (0.7, 1.4)]
        # As where a context is stretched: slow angles change by one number, fast ones stay.
        count = self.num_rotated // 2
        return found + [
            Change(part=PARTS[0], way=way, number=number, name=str(at))
            for at in range(1, min(count, _MOST_ANGLES))
            for way in ("stretched-from", "stretched-before")
            for number in (0.25, 4.0)
        ]

    def _list_widths(self) -> list[int]:
        return [n for n in range(2, self.num_rotated, 2) if self.num_rotated % n == 0 or n > 2]

    def turn(self, x: Tensor, numbers: Mapping[str, Tensor], change: Change | None) -> Tensor:
        """Return the heads (b, s, N, D) turned by the angles of their positions, or otherwise."""
        way, number = (change.way, change.number) if change is not None else ("", None)
        at = _renumber(numbers.get(way, numbers[GLOBAL]).double(), way, number or 0.0)
        at = at + (number or 0.0) * numbers[OWNER] if way == "gap" else at
        theta = number if way == "base" and number is not None else self.theta
        yarn = None if way == "unstretched" else self.yarn
        size = self.width if way == "whole" else self.num_rotated
        width = int(number or size) if way in ("partial", "partial-last") else size
        cos, sin = (each.squeeze(-2) for each in compute_rotation(at.unsqueeze(0), width, theta, yarn))
        length = torch.hypot(cos, sin)
        cos, sin = cos / length, sin / length  # (1, s, R/2)
        if way.startswith("stretched") and change is not None:
            far = compute_rotation((number or 1.0) * at.unsqueeze(0), width, theta, yarn)
            other = [each.squeeze(-2) / length for each in far]
            is_other = (torch.arange(cos.shape[-1]) >= int(change.name)) == (way == "stretched-from")
            cos, sin = torch.where(is_other, other[0], cos), torch.where(is_other, other[1], sin)
        if way == "partial-frequencies":
            width = int(number or size)
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        if way == "first-half":
            turned = torch.arange(cos.shape[-1]) < cos.shape[-1] // 2
            cos, sin = torch.where(turned, cos, 1.0), torch.where(turned, sin, 0.0)
        if way == "swapped":
            cos, sin = sin, cos
        in_neighbours = {"neighbours": True, "halves": False}.get(way, self.in_neighbours)
        if way in ("partial", "partial-frequencies"):
            begin = self.width - self.num_rotated
        elif way == "own-part-first":
            begin = 0
        else:
            begin = self.width - width
        return _turn(x, begin, (cos, sin), in_neighbours=in_neighbours, is_mixed=way == "mixed-pairs")


def _turn(
    x: Tensor, begin: int, rotation: tuple[Tensor, Tensor], *, in_neighbours: bool, is_mixed: bool
) -> Tensor:
    """Return heads (b, s, N, D) whose elements from `begin` on are turned, as many as there are angles for.

    Where it `is_mixed`, pairs are of one kind and the angles stand as for the other.
    """
    cos, sin = (each.unsqueeze(-2) for each in rotation)
    end = begin + 2 * cos.shape[-1]
    before, turned, after = x[..., :begin], x[..., begin:end], x[..., end:]
    if is_mixed:
        whole = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        if not in_neighbours:
            whole = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    if in_neighbours:
        first, second = turned[..., ::2], turned[..., 1::2]
        other = torch.stack([-second, first], dim=-1).flatten(-2)
        whole = whole if is_mixed else (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1))
    else:
        first, second = turned.chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
        whole = whole if is_mixed else (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
    return torch.cat([before, turned * whole[0] + other * whole[1], after], dim=-1)


def _renumber(at: Tensor, way: str, number: float) -> Tensor:
    """Return the positions (s) by which heads are rotated."""
    ways = {
        "none": lambda: torch.zeros_like(at),
        "opposite": lambda: -at,
        "twice": lambda: 2.0 * at,
        "interpolated": lambda: number * at,
        "offset": lambda: at + number,
        "modulo": lambda: at % number,
        "restart": lambda: torch.where(at < number, at, at - number),
        "clamped": lambda: at.clamp(max=number - 1.0),
    }
    return ways[way]() if way in ways else at
