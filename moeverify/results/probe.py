"""Probes of `moeverify doctor` and their answers. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from moeverify.results.record import Record

Status = Literal["ok", "warn", "fail"]


class Probe(StrEnum):
    """The probes that need ranks, each with how many; `is_collective` ones are tried with every backend."""

    num_ranks: int
    is_collective: bool

    def __new__(cls, value: str, num_ranks: int = 1, is_collective: bool = False) -> Self:
        """Make a member that is its value."""
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


class Outcome(StrEnum):
    """The outcome of a probe, or why it has none."""

    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"  # with an error, so never a wrong number
    SUM = "sum"  # an average that is a sum
    ABSENT = "absent"
    BROKEN = "broken"  # it is installed, and its import fails
    SLOW = "slow"  # it works, without a fast path
    HUNG = "hung"
    CRASHED = "crashed"
    UNSTARTED = "unstarted"


class Answer(Record):
    """The answer of a probe: its outcome, the names or versions that it `found` or that are `wrong`, an `error`."""

    outcome: Outcome
    found: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    error: str = ""


class ProbeRow(Record):
    """A row of the report: `fail` makes verdicts wrong or impossible, `warn` limits them."""

    name: str
    value: str
    meaning: str
    status: Status = "ok"


class ProbeEvent(Record):
    """A probe that begins to run, or whose row is known now."""

    name: str
    row: ProbeRow | None = None
