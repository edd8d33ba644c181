"""Why a rank ended, and why a job has no result, as data. No torch.

`moeverify.report.words.failure` makes the sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field

from moeverify.results.record import Record
from moeverify.results.trace import CollectiveRecord


class End(StrEnum):
    """How a rank ended a job that failed."""

    RAISED = "raised"  # an exception, `error`
    BROKE_OFF = "broke off"  # an exception, `error`, that says no more than that a peer has gone
    KILLED = "killed"  # by `signal`
    CRASHED = "crashed"  # the interpreter's own last line, `error`
    EXITED = "exited"  # with `status`, and no report
    OVER_TIME = "over time"  # still in the job after `timeout`
    HOLDS_LOCK = "holds lock"  # over its time inside C code that holds the interpreter's lock
    FROZEN = "frozen"  # over its time, and in `process_state`
    STOPPED = "stopped"  # after another rank had failed
    SIGNALLED = "signalled"  # by `signal` from outside
    STOPPED_WITH_LAUNCH = "stopped with launch"
    GONE = "gone"  # with its launch, and nothing of it is left
    SILENT = "silent"  # a rank of another launcher of which nothing was heard


ProcessState = Literal["stopped", "traced", "uninterruptible"]


class Waiting(Record):
    """The collective that a rank waits in; if it waits in none, where its code is, as far as that is known."""

    collective: CollectiveRecord | None = None
    place: str = ""


RankState = Literal["raised", "killed", "hung", "stopped", "lost"]

STATES: Mapping[End, RankState] = {
    End.RAISED: "raised",
    End.BROKE_OFF: "stopped",
    End.KILLED: "killed",
    End.CRASHED: "killed",
    End.EXITED: "lost",
    End.OVER_TIME: "hung",
    End.HOLDS_LOCK: "hung",
    End.FROZEN: "hung",
    End.STOPPED: "stopped",
    End.SIGNALLED: "stopped",
    End.STOPPED_WITH_LAUNCH: "stopped",
    End.GONE: "lost",
    End.SILENT: "lost",
}


class RankEnd(Record):
    """How one rank ended; which fields there are depends on `how`. Units: `timeout` in seconds."""

    how: End
    error: str = ""
    signal: int | None = None
    status: int | None = None
    timeout: float | None = None
    process_state: ProcessState | None = None
    waiting: Waiting | None = None


class Absence(Record):
    """Why a rank is not in a collective that others wait in: it waits in another one, has left, or never entered."""

    rank: int
    how: Literal["in another of the group", "has left", "never entered"]
    waiting: Waiting


class Wait(Record):
    """Ranks that wait in one collective, and the ranks of its group that are not there."""

    ranks: tuple[int, ...]
    collective: CollectiveRecord
    absent: tuple[Absence, ...] = ()


class Hang(Record):
    """In which collectives ranks wait; if in none, where each of them is."""

    waits: tuple[Wait, ...] = ()
    places: dict[int, str] = Field(default_factory=dict)


class Disagreement(Record):
    """The first collective of a group in which its ranks issued different ones: the record of each rank."""

    by_rank: dict[int, CollectiveRecord]


class Cause(StrEnum):
    """What kept a job from its result."""

    RANK = "rank"  # a rank failed
    OVER_TIME = "over time"  # ranks are still in it after `timeout`
    UNREPORTED = "unreported"  # the same, and no rank could say so
    LAUNCHER = "launcher"  # the launcher's own process ended, with `launcher_status` or `launcher_error`
    NOT_IN_TIME = "not in time"  # the ranks did not come up in time
    TOO_FEW = "too few"  # it needs `num_needed` ranks, and `num_started` were started
    ENDED_BEFORE = "ended before"  # the ranks ended with `earlier_job`


Phase = Literal["in the job", "before its first job", "between two jobs"]


class JobFailure(Record):
    """Why a job has no result, and in which phase of its launch that was. Units: `timeout` in seconds.

    `rank` and `end` are those where it began. `only_waited`: that rank had no part in the job. A `launcher_status`
    below 0 is minus the number of a signal, None says that the launcher still runs. `not_up` has the ranks that did
    not come up in time, and where their code is, as far as that is known.
    """

    cause: Cause
    phase: Phase = "in the job"
    rank: int | None = None
    end: RankEnd | None = None
    only_waited: bool = False
    hang: Hang | None = None
    disagreement: Disagreement | None = None
    timeout: float | None = None
    launcher_status: int | None = None
    launcher_error: str = ""
    num_needed: int = 0
    num_started: int = 0
    earlier_job: str = ""
    not_up: dict[int, str] = Field(default_factory=dict)
