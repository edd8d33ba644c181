"""How a loss weighs its tokens: what divides the loss of each, and which do not count as often as others."""

from __future__ import annotations

from typing import Literal

from moeverify.results.change import Change
from moeverify.results.factor import Factor
from moeverify.results.record import Record

GroupUnit = Literal[
    "batch",
    "row",
    "row-of-rank",
    "position",
    "rank",
    "micro-batch",
    "same-micro-batch",
    "chunk",
    "chunk-by-position",
    "chunk-of-row",
    "chunk-of-positions",
]
"""What tokens have in common: a micro-batch is that of one rank, the same micro-batch that of all ranks.

Chunks are of a micro-batch: of its tokens row by row, of its tokens position by position, of each of its rows, or of
its positions, in which all rows are."""

CountOf = Literal[
    "valid", "all", "size", "rows", "valid-less-rows", "all-less-rows", "root-of-valid", "groups"
]
"""What of a group counts: valid tokens, all tokens, the size that a chunk should have, rows, tokens less one of each
row, the root of the valid ones; or how many groups there are in the `inside` of each."""

Whose = Literal["own", "before", "first", "last", "largest", "smallest"]
"""Whose count it is: that of the token's own group, of the one before it; of all tokens that of one group."""

Dependence = Literal["position", "row", "label", "token"]


class TokenGroups(Record):
    """Groups of tokens; `size` is that of chunks, in tokens or in positions."""

    unit: GroupUnit
    size: int = 0


class TokenCount(Record):
    """A number that each token has from its group."""

    of: CountOf
    groups: TokenGroups
    whose: Whose = "own"
    inside: TokenGroups | None = None


class TokenSet(Record):
    """Some tokens: groups of some `numbers`, each rank's own, or the first or the last of each group.

    Of `every` one of so many in order `numbers` has how many, and its place among these, from 0 on.

    First and last ones are so many as `numbers` says, of each micro-batch or row. They count `times` as often as
    others.
    """

    groups: TokenGroups
    which: Literal["first", "last", "every", "numbers", "own"]
    numbers: tuple[int, ...] = ()
    times: float = 0.0


class Averaging(Record):
    """How the loss of each token counts: `times` / `over`, `factor` times; nothing where that is 1.

    `without` are tokens that do not count like that, `only` those that alone count. `depends_on` is what alone tells
    the weight of a token, where its formula is not known. `divisor` is what divides all of them, and the number of
    valid tokens.
    """

    over: TokenCount | None = None
    times: TokenCount | None = None
    factor: Factor | None = None
    without: TokenSet | None = None
    only: TokenSet | None = None
    depends_on: Dependence | None = None
    divisor: tuple[int, int] | None = None

    @property
    def is_formula(self) -> bool:
        """Return whether it says what divides or multiplies a token, and not alone which count otherwise."""
        return self.over is not None or self.times is not None or self.divisor is not None


class Reaveraged(Record):
    """The loss of each token has another weight than one over the valid tokens of the batch.

    `averagings` are all that give these weights; none where these are right, or nothing explains them: then
    `is_weighed`. `changes` are what of the loss of each token is otherwise besides. `is_reported` says that the
    reported number alone is made so.
    """

    kind: Literal["reaveraged"] = "reaveraged"
    averagings: tuple[Averaging, ...]
    changes: tuple[Change, ...] = ()
    is_weighed: bool = False
    is_reported: bool = False
