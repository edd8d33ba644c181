"""Probes of `moeverify doctor` and their answers. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from moeverify.results.record import Record

Status = Literal["ok", "warn", "fail"]


class Probe(StrEnum):
    """The probes that need ranks, with their number of ranks; `is_collective` ones run on every backend."""

    num_ranks: int
    is_collective: bool

    def __new__(cls, value: str, num_ranks: int = 1, is_collective: bool = False) -> Self:
        """Create a member equal to `value`."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.num_ranks = num_ranks
        member.is_collective = is_collective
        return member

    SUMS = "collectives", 2, True
    AVERAGE = "reduce_scatter AVG", 2, True
    ALL_TO_ALL = "uneven all_to_all", 2, True
    STRIDED = "strided all_reduce", 2, True
    LAYOUTS = "gradient layouts", 2, True
    SCATTER_LAYOUTS = "reduce_scatter layouts", 2, True
    GATHER_BACKWARD = "all_gather backward", 2, True
    PREMULTIPLIED = "PREMUL_SUM", 2, True
    DIVIDE_FACTOR = "FSDP2 divide factor"
    GROUPED_MM = "grouped_mm"
    FUSED_SGD = "fused SGD on DTensor"
    TRITON = "triton"
    MEGABLOCKS = "megablocks"
    GPU = "GPU"
    PEER_ACCESS = "GPU peer access", 2
    NCCL = "NCCL version"


class ProbeOutcome(StrEnum):
    """The outcome of a probe, or the reason why it has none."""

    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"  # raises an error, so it never returns a wrong number
    SUM = "sum"  # an average returns the sum
    ABSENT = "absent"
    BROKEN = "broken"  # installed, but its import fails
    SLOW = "slow"  # works, but without a fast path
    HUNG = "hung"
    CRASHED = "crashed"
    UNSTARTED = "unstarted"


class Answer(Record):
    """The answer of a probe: its outcome, names or versions `found` or `wrong`, and an `error`."""

    outcome: ProbeOutcome
    found: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    error: str = ""


class ProbeRow(Record):
    """A row of the report; `fail` makes verdicts wrong or impossible, and `warn` limits them."""

    name: str
    value: str
    meaning: str
    status: Status = "ok"
    remedy: str = ""


class Diagnostics(Record):
    """The results of `moeverify doctor`; `missing` names probes without a result."""

    rows: tuple[ProbeRow, ...]
    missing: tuple[str, ...] = ()
