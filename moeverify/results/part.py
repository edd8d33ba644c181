"""Parts of a tensor to which a wrong factor, a missing sum or a permutation can be restricted."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record


class Tokens(Record):
    """The tokens of the batch that all given fields select.

    `data_rank` and `context_rank` are indices among the ranks with different rows and with different
    positions.
    """

    data_rank: int | None = None
    context_rank: int | None = None
    micro_batch: int | None = None


class Block(Record):
    """Some indices along a dim of a tensor; `unit` is their meaning, such as row, head or expert."""

    dim: int
    indices: tuple[int, ...]
    unit: str = "index"


class Group(Record):
    """Some of the parameters that a sum includes.

    They share a `placement` over `axis`, or a name if `axis` is empty. `family` restricts them to a family
    such as `expert`, or with `is_outside` to all others.
    """

    tensors: tuple[str, ...]
    axis: str = ""
    placement: Literal["", "replicated", "sharded"] = ""
    family: str = ""
    is_outside: bool = False


class Part(Record):
    """The part of a tensor that every given field selects; without fields, the whole tensor.

    `term` is a loss term (lm, balance, z), for a gradient. `group` are the parameters whose squares are
    selected, for a norm.
    """

    term: str = ""
    tokens: Tokens | None = None
    group: Group | None = None


WHOLE = Part()


class Contribution(Record):
    """A part of the expected value and its multiple in the actual value; the correct multiple is 1."""

    part: Part
    factor: Factor

    @property
    def is_right(self) -> bool:
        """Return whether the part has its correct multiple."""
        return self.factor.is_one
