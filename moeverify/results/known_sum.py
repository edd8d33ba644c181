"""A sum of tensors that are known where a module computes, in the place of the right one."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record


class Term(Record):
    """A tensor, by `end:module` of where it is read, nothing for what it should be, and how often it counts."""

    tensor: str
    factor: float


class KnownSum(Record):
    """What a module made is another sum of tensors that are known there than one device makes.

    `sums` are all that explain as well with as few terms. With `ranks` it holds of these alone.
    """

    kind: Literal["known-sum"] = "known-sum"
    sums: tuple[tuple[Term, ...], ...]
    ranks: tuple[int, ...] = ()
