"""Collectives that a rank issues inside a module, as data."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record


class IssuedCollective(Record):
    """Collectives with the same operation, group, dtype and call site that a rank issues inside a module.

    `axis` is the mesh axis of the group, or empty. `shapes` are the distinct shapes of the rank's first
    tensor, and empty for an operation without a tensor. `site` is the first frame outside torch.
    """

    direction: Literal["forward", "backward"]
    op: str
    axis: str = ""
    group: tuple[int, ...] = ()
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    times: int = 1
    site: str = ""
