"""What a rank read in place of its own tokens, labels, positions or masks, as plain data. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from moeverify.results.record import Record


class Batch(StrEnum):
    """What a micro-batch is made of, in the order in which a step reads it."""

    TOKENS = "tokens"
    POSITIONS = "positions"
    MASK = "padding mask"  # of the routers' counts and sums
    LABELS = "labels"
    LOSS_MASK = "loss mask"  # the labels that do not count


class SourceKind(StrEnum):
    """Whose values were read."""

    SHARE = "share"  # of a step, a rank and a micro-batch
    ORDER = "order"  # the rank's own rows, in another order
    ROWS = "rows"  # other rows of the global batch
    SHIFT = "shift"  # of a position so many further on
    LOCAL = "local"  # positions, counted from 0 on every rank
    NEXT = "next"  # as labels the rank's own next tokens, where others follow in the row
    WITHOUT = "without"  # a mask that leaves out some positions of every row
    LABEL = "label"  # a mask that leaves out all tokens whose label is one number
    ALL = "all"  # a mask that leaves nothing out
    UNREAD = "unread"  # nothing: a micro-batch was left out
    UNKNOWN = "unknown"


class ReadSource(Record):
    """Where values come from.

    `step`, `rank` and `micro_batch` are those of a `share`, None where they are the reader's own. `rows` are the
    first rows of the global batch that were read, and `shift` is in positions. `positions` are those of
    every row that are left out, and `label` the one whose tokens are.
    """

    kind: SourceKind
    step: int | None = None
    rank: int | None = None
    micro_batch: int | None = None
    rows: tuple[int, ...] = ()
    shift: int = 0
    positions: tuple[int, ...] = ()
    label: int | None = None


class Misread(Record):
    """What one rank read wrong in one micro-batch: `num_wrong` of its `num_elements` differ from its own."""

    batch: Batch
    step: int
    micro_batch: int
    num_micro_batches: int
    num_wrong: int
    num_elements: int
    source: ReadSource


class MisreadOnRank(Record):
    """A misread micro-batch with the rank that read it."""

    rank: int
    misread: Misread


class DataFacts(Record):
    """What the ranks read wrong in a step, the clearest of it first; `also` was read from the same place."""

    about: Literal["data"] = "data"
    read: tuple[MisreadOnRank, ...]
    also: tuple[Batch, ...] = ()
    num_more: int = 0
