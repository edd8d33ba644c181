"""The end of a rank, and the reason why a job has no result, as data. No torch.

`moeverify.report.words.failure` turns them into sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field

from moeverify.results.record import Record
from moeverify.results.trace import CollectiveRecord


class EndKind(StrEnum):
    """The way in which a rank ended a failed job."""

    RAISED = "raised"  # an exception, `error`
    BROKE_OFF = "broke off"  # an exception, `error`, that only reports the loss of a peer
    KILLED = "killed"  # by `signal`
    CRASHED = "crashed"  # the interpreter's own last line, `error`
    EXITED = "exited"  # with `status` and without a report
    LEFT = "left"  # ended by itself, with a status that is not known
    OVER_TIME = "over time"  # still in the job after `timeout`
    HOLDS_LOCK = "holds lock"  # past `timeout`, in C code that holds the interpreter's lock
    FROZEN = "frozen"  # past `timeout`, and in `process_state`
    STOPPED = "stopped"  # after another rank had failed
    SIGNALLED = "signalled"  # by `signal`, sent from outside
    STOPPED_WITH_LAUNCH = "stopped with launch"
    GONE = "gone"  # ended with its launch, without a trace
    SILENT = "silent"  # a rank of another launcher that never reported


ProcessState = Literal["stopped", "traced", "uninterruptible"]


class MachineLoad(Record):
    """The load of a machine over the last minute, and its processors that this process may use.

    `not_counted` is the time that ranks waited for a processor and that no limit counts. Units: seconds.
    """

    load: float
    num_processors: int
    not_counted: float


class Waiting(Record):
    """The collective that a rank waits in, or else the current place in its code if known.

    `has_ended` is true for a rank whose process is gone.
    """

    collective: CollectiveRecord | None = None
    place: str = ""
    has_ended: bool = False


RankState = Literal["raised", "killed", "hung", "stopped", "lost"]

STATES: Mapping[EndKind, RankState] = {
    EndKind.RAISED: "raised",
    EndKind.BROKE_OFF: "stopped",
    EndKind.KILLED: "killed",
    EndKind.CRASHED: "killed",
    EndKind.EXITED: "lost",
    EndKind.LEFT: "lost",
    EndKind.OVER_TIME: "hung",
    EndKind.HOLDS_LOCK: "hung",
    EndKind.FROZEN: "hung",
    EndKind.STOPPED: "stopped",
    EndKind.SIGNALLED: "stopped",
    EndKind.STOPPED_WITH_LAUNCH: "stopped",
    EndKind.GONE: "lost",
    EndKind.SILENT: "lost",
}


class RankEnd(Record):
    """The end of one rank. The fields that are set depend on `how`. Units: `timeout` in seconds."""

    how: EndKind
    error: str = ""
    signal: int | None = None
    status: int | None = None
    timeout: float | None = None
    process_state: ProcessState | None = None
    waiting: Waiting | None = None


class Absence(Record):
    """The reason why a rank is not in a collective that others wait in.

    It waits in another collective of the group, has left, or never entered, or its device has this one queued
    behind the collective that it waits in.
    """

    rank: int
    how: Literal["in another of the group", "has left", "never entered", "queued"]
    waiting: Waiting


class Wait(Record):
    """Ranks that wait in one collective, and the absent ranks of its group."""

    ranks: tuple[int, ...]
    collective: CollectiveRecord
    absent: tuple[Absence, ...] = ()


class Hang(Record):
    """The collectives in which ranks wait.

    `places` has the current place of each rank in its code if no rank waits in a collective.
    """

    waits: tuple[Wait, ...] = ()
    places: dict[int, str] = Field(default_factory=dict)


class Disagreement(Record):
    """The first collective in which the ranks of a group differ, with the record of each rank."""

    by_rank: dict[int, CollectiveRecord]


class FailureCause(StrEnum):
    """The reason why a job has no result."""

    RANK = "rank"  # a rank failed
    OVER_TIME = "over time"  # ranks are still in it after `timeout`
    UNREPORTED = "unreported"  # the same, but no rank could report it
    LAUNCHER = "launcher"  # the launcher's own process ended, with `launcher_status` or `launcher_error`
    NOT_IN_TIME = "not in time"  # the ranks did not come up in time
    TOO_FEW = "too few"  # `num_needed` ranks are needed, and `num_started` were started
    ENDED_BEFORE = "ended before"  # the ranks ended with `earlier_job`


Phase = Literal["in the job", "before its first job", "between two jobs"]


class JobFailure(Record):
    """The reason why a job has no result, and the phase of the launch. Units: `timeout` in seconds.

    `machine` has the load of the machine if a time was over. `rank` and `end` describe the rank that failed
    first. `only_waited` means that this rank had no part in the job. `launcher_status` below 0 is the negative
    signal number; None means that the launcher still runs. `not_up` has the ranks that did not start in time,
    with the current place in their code if known.
    """

    cause: FailureCause
    phase: Phase = "in the job"
    rank: int | None = None
    end: RankEnd | None = None
    only_waited: bool = False
    hang: Hang | None = None
    disagreement: Disagreement | None = None
    timeout: float | None = None
    machine: MachineLoad | None = None
    launcher_status: int | None = None
    launcher_error: str = ""
    num_needed: int = 0
    num_started: int = 0
    earlier_job: str = ""
    not_up: dict[int, str] = Field(default_factory=dict)
