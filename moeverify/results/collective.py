"""A kind of collective that a rank issued inside a module, as data."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record


class IssuedCollective(Record):
    """Collectives of one operation, group, dtype and call site that a rank issued inside a module.

    `axis` is the mesh axis whose group it is, or nothing; `shapes` are those of the rank's first tensor, without
    repetition, and empty for an operation without a tensor. `site` is the first frame outside torch.
    """

    direction: Literal["forward", "backward"]
    op: str
    axis: str = ""
    group: tuple[int, ...] = ()
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    times: int = 1
    site: str = ""
