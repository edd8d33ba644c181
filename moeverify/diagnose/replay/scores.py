"""The scores of attention, with a part of them otherwise: what they are multiplied by, and what is added to them.

Letters: b rows, N heads, s queries, S keys, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.results.change import Change

_SCALES = (
    "none",
    "width",
    "value-width",
    "rotated-width",
    "unrotated-width",
    "all-heads",
    "hidden-width",
    "hidden-share",
    "kv-width",
    "multiplied",
)


@dataclass(frozen=True)
class Sizes:
    """Widths that a scale may be made of, and the number of heads."""

    width: int
    values: int
    rotated: int
    hidden: int
    num_heads: int
    num_kv_heads: int

    def find_scale(self, change: Change | None, positions: Tensor) -> float | Tensor:
        """Return what the scores are multiplied by: a number, or one for each query, (s, 1)."""
        width = float(self.width)
        right = math.pow(width, -0.5)
        if change is None:
            return right
        number = float(change.number or 1.0)
        if change.way == "log-position":
            counted = torch.floor((positions + 1) / float(change.name or 1)) + 1.0
            return right * (1.0 + number * counted.double().log()).unsqueeze(-1)
        if change.way == "log-length":
            return right * ((positions + 1).double().log() / math.log(number + 1.0)).unsqueeze(-1)
        sizes = {
            "factor": right * number,
            "none": 1.0,
            "width": 1.0 / width,
            "value-width": math.pow(self.values, -0.5),
            "rotated-width": math.pow(self.rotated, -0.5),
            # A head that is rotated throughout has none.
            "unrotated-width": math.pow(max(width - self.rotated, 0.0) or width, -0.5),
            "all-heads": math.pow(width * self.num_heads, -0.5),
            "hidden-width": math.pow(self.hidden, -0.5),
            "hidden-share": math.pow(self.hidden / self.num_heads, -0.5),
            "kv-width": math.pow(width * self.num_kv_heads, -0.5),
            "multiplied": math.pow(width, 0.5),
        }
        return sizes[change.way]


def list_scales(length: int) -> list[Change]:
    """Return the scales that are made of other sizes."""
    found = [Change(part="scale", way=way) for way in _SCALES]
    found += [Change(part="scores", way=way) for way in ("slopes", "slopes-opposite")]
    return found + [Change(part="scale", way="log-length", number=number) for number in _powers(length)]


def fit_scores(length: int) -> list[Change]:
    """Return what has a number that is not known."""
    found = [Change(part="scale", way="factor", number=number) for number in (1.5, 0.4, 4.0)]
    found += [Change(part="scores", way="capped", number=number) for number in (3.0, 30.0)]
    found += [Change(part="scores", way=way, number=0.1) for way in ("distance", "slopes-times")]
    found += [
        Change(part="scale", way="log-position", number=0.1, name=str(number))
        for number in (1, *_powers(length))
    ]
    return found


def _powers(length: int) -> list[int]:
    return [2**power for power in range(1, length.bit_length()) if 2**power <= length]


def change_scores(scores: Tensor, positions: Tensor, heads: Tensor, count: int, change: Change) -> Tensor:
    """Return other scores (b, N, s, S) of queries at positions (s) and some heads of so many."""
    number = float(change.number or 1.0)
    if change.way == "capped":
        return number * torch.tanh(scores / number)
    distance = (positions.unsqueeze(-1) - torch.arange(scores.shape[-1])).to(scores.dtype)
    if change.way == "distance":
        return scores - number * distance
    slopes = 2.0 ** (-8.0 * (heads + 1).to(scores.dtype) / count)[:, None, None]
    sign: Mapping[str, float] = {"slopes": 1.0, "slopes-opposite": -1.0}
    return scores - sign.get(change.way, number) * slopes * distance
