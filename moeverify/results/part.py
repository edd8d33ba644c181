"""Parts of a tensor: what a wrong factor, a missing sum or a permutation can be restricted to."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record


class Tokens(Record):
    """Tokens of the batch: those that all given fields select.

    `data_rank` and `context_rank` are places among the ranks that see other rows and other positions. `padding` are
    the tokens that no loss should see.
    """

    data_rank: int | None = None
    context_rank: int | None = None
    micro_batch: int | None = None
    padding: bool = False


class Block(Record):
    """Some indices along a dim of a tensor; `unit` says what they are, such as row, head or expert."""

    dim: int
    indices: tuple[int, ...]
    unit: str = "index"


class Group(Record):
    """Some parameters, of a sum over all: those that are alike in `placement` over an axis, or of one name.

    `axis` is empty where it is their name that they have in common. With `family` they are all of that family, such
    as `expert`, or with `is_outside` all others.
    """

    tensors: tuple[str, ...]
    axis: str = ""
    placement: Literal["", "replicated", "sharded"] = ""
    family: str = ""
    is_outside: bool = False


class Part(Record):
    """What of a tensor is meant: all that every given field selects, and the whole of it where none is given.

    `term` is a loss term (lm, balance, z) of which the tensor is a gradient, and `router` the one of whose layer that
    term is, where it is a sum over layers. `added` is something else that was added
    to it. `group` are the parameters whose squares are meant, of a norm. `use` is one of several that a weight has,
    of a gradient: what comes through that.
    """

    term: str = ""
    router: str = ""
    tokens: Tokens | None = None
    block: Block | None = None
    added: Literal["", "weight", "gradient-of-step-before"] = ""
    group: Group | None = None
    use: str = ""

    @property
    def belongs(self) -> bool:
        """Return whether the expected value has this part: padding and what is added have no place in it."""
        return not self.added and (self.tokens is None or not self.tokens.padding)


WHOLE = Part()


class Contribution(Record):
    """A part of the expected value, and how often the actual value has it: once where nothing is wrong."""

    part: Part
    factor: Factor

    @property
    def is_right(self) -> bool:
        """Return whether it is there as often as it should be."""
        return self.factor.is_one if self.part.belongs else self.factor.is_zero
