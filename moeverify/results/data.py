"""Tokens, labels, positions or masks that a rank read instead of its own, as plain data. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from moeverify.results.record import Record


class BatchField(StrEnum):
    """The parts of a micro-batch, in the order in which a step reads them."""

    TOKENS = "tokens"
    POSITIONS = "positions"
    MASK = "padding mask"  # for the counts and sums of the routers
    LABELS = "labels"
    LOSS_MASK = "loss mask"  # the labels that the loss ignores


class SourceKind(StrEnum):
    """The kind of source that wrong values were read from."""

    SHARE = "share"  # the share of a step, a rank and a micro-batch
    ORDER = "order"  # the rank's own rows in another order
    ROWS = "rows"  # other rows of the global batch
    SHIFT = "shift"  # the same row, at positions shifted by a constant
    LOCAL = "local"  # positions counted from 0 on every rank
    NEXT = "next"  # labels from the rank's own next tokens, although other tokens follow in the row
    WITHOUT = "without"  # a mask that excludes some positions of every row
    LABEL = "label"  # a mask that excludes all tokens with one label value
    ALL = "all"  # a mask that excludes nothing
    UNREAD = "unread"  # nothing was read: a micro-batch was skipped
    UNKNOWN = "unknown"


class ReadSource(Record):
    """The source of values that were read.

    For a `share`, `step`, `rank` and `micro_batch` locate it; None means the reader's own. `rows` are the
    first rows of the global batch that were read. `shift` is a number of positions. `positions` and `label`
    describe the effect of a mask: excluded positions of every row, or tokens with this label.
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
    """A wrong read of one rank in one micro-batch.

    `num_wrong` of `num_elements` elements differ from the rank's own share.
    """

    batch: BatchField
    step: int
    micro_batch: int
    num_micro_batches: int
    num_wrong: int
    num_elements: int
    source: ReadSource


class MisreadOnRank(Record):
    """A wrong read, with the rank that made it."""

    rank: int
    misread: Misread


class DataFacts(Record):
    """Wrong reads of the ranks in one step, the clearest first.

    `also` are parts of the micro-batch that were read from the same source. `num_more` wrong reads are not
    listed.
    """

    about: Literal["data"] = "data"
    read: tuple[MisreadOnRank, ...]
    also: tuple[BatchField, ...] = ()
    num_more: int = 0
