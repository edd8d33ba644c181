"""Sentences about ranks that ended and jobs without a result."""

from __future__ import annotations

import signal

from moeverify.report.words.collective import (
    describe_disagreement,
    describe_hang,
    describe_record,
    describe_waiting,
    list_waits,
)
from moeverify.results.failure import EndKind, FailureCause, JobFailure, RankEnd
from moeverify.results.run import RankReport

_ENDS = {
    EndKind.RAISED: "{error}",
    EndKind.BROKE_OFF: "lost the connection to its peer: {error}",
    EndKind.CRASHED: "{error}",
    EndKind.KILLED: "was killed by {signal}",
    EndKind.EXITED: "ended with status {status} without a report",
    EndKind.LEFT: "has ended",
    EndKind.OVER_TIME: "still in the job after {timeout:g} s",
    EndKind.HOLDS_LOCK: "timed out inside C code that holds the interpreter's lock",
    EndKind.FROZEN: "over its time: {process}",
    EndKind.STOPPED: "stopped after another rank failed",
    EndKind.SIGNALLED: "got {signal}: a peer has died, or the launch was cancelled",
    EndKind.STOPPED_WITH_LAUNCH: "stopped with its launch",
    EndKind.GONE: "ended with its launch, without a report",
    EndKind.SILENT: "ended without a report (see the log of its launcher)",
}
_OWN_ENDS = (EndKind.RAISED, EndKind.CRASHED, EndKind.KILLED, EndKind.FROZEN)
_PROCESS_STATES = {
    "stopped": "its process is stopped (SIGSTOP)",
    "traced": "a debugger holds its process",
    "uninterruptible": "its process is inside a system call that cannot be interrupted (a disk or a device)",
}


def word_report(report: RankReport) -> RankReport:
    """Return the report of a rank with its end and its last collective in words."""
    last = describe_record(report.collective) if report.collective is not None else ""
    summary = describe_end(report.end) if report.end is not None else report.summary
    return report.model_copy(update={"summary": summary, "last_collective": last or report.last_collective})


def describe_end(end: RankEnd) -> str:
    """Return how a rank ended and, for a hang, the collective in which it waits."""
    text = _ENDS[end.how].format(
        error=end.error,
        signal=_name_signal(end.signal),
        status=end.status,
        timeout=end.timeout or 0.0,
        process=_PROCESS_STATES.get(end.process_state or "", ""),
    )
    if end.how is EndKind.KILLED and end.signal == signal.SIGKILL:
        text += " (kill -9, or the kernel when memory ran out)"
    return text if end.waiting is None else f"{text}: {describe_waiting(end.waiting)}"


def describe_failure(failure: JobFailure | None) -> str:
    """Return why a job has no result; empty if it has one."""
    if failure is None:
        return ""
    text = _describe_cause(failure)
    return text if failure.phase == "in the job" else f"the launch failed {failure.phase}: {text}"


def describe_standing(failure: JobFailure) -> list[str]:
    """Return lines about a script in which a collective lasts: who waits for whom, and the disagreement."""
    waited = f"a collective has waited for {failure.timeout or 0.0:g} s{_describe_limit(failure, '--hang')}"
    return [waited, *_list_waits(failure)]


def describe_watched_end(failure: JobFailure, code: int) -> list[str]:
    """Return lines about a script that ended with a code: the rank that failed, and who waited for whom."""
    lines = _list_waits(failure)
    return [f"the script ended with code {code}", *(lines or ["no rank was in a collective"])]


def _list_waits(failure: JobFailure) -> list[str]:
    hang, end = failure.hang, failure.end
    waits = () if hang is None else hang.waits
    lines = []
    if end is not None and end.how in _OWN_ENDS:
        verb = "raised " if end.how is EndKind.RAISED else ""
        lines.append(f"rank {failure.rank} {verb}{describe_end(end.model_copy(update={'waiting': None}))}")
    if hang is not None and waits:
        lines += list_waits(hang)
    if failure.disagreement is not None:
        lines.append(describe_disagreement(failure.disagreement))
    return lines


def _describe_cause(failure: JobFailure) -> str:
    origin = _describe_origin(failure)
    process = f"the launcher's process {_describe_status(failure.launcher_status)}"
    limit = _describe_limit(failure)
    timeout = f"over its {failure.timeout or 0.0:g} s{limit}"
    return {
        FailureCause.RANK: origin,
        FailureCause.OVER_TIME: f"{timeout}: {origin}",
        FailureCause.UNREPORTED: f"{timeout}, and its ranks did not report: {origin}",
        FailureCause.LAUNCHER: f"{process}; {failure.launcher_error or origin}",
        FailureCause.NOT_IN_TIME: f"{_describe_not_up(failure)}{limit}",
        FailureCause.TOO_FEW: f"it needs {failure.num_needed} ranks, and {failure.num_started} were started",
        FailureCause.ENDED_BEFORE: f"the ranks ended with job {failure.earlier_job}",
    }[failure.cause]


def _describe_limit(failure: JobFailure, option: str = "--timeout") -> str:
    """Return the option that raises a limit, and the load of the machine, in parentheses."""
    machine = failure.machine
    if machine is None:
        return ""
    number = machine.num_processors
    parts = [f"raise {option}", f"load {machine.load:.1f} on {number} processor{'' if number == 1 else 's'}"]
    if machine.not_counted >= 1.0:
        parts.append(f"{machine.not_counted:.0f} s of waiting for a processor not counted")
    return f" ({'; '.join(parts)})"


def _describe_not_up(failure: JobFailure) -> str:
    which = [
        f"rank {rank}{f', which is at {place},' if place else ''}" for rank, place in failure.not_up.items()
    ]
    when = "in time" if failure.timeout is None else f"within {failure.timeout:g} s"
    return f"{', '.join(which) or 'the ranks'} did not come up {when}"


def _describe_origin(failure: JobFailure) -> str:
    """Return the rank on which the failure began, how, and any hang or disagreement of the ranks."""
    sentences = []
    if failure.hang is not None:
        sentences.append(describe_hang(failure.hang))
    elif failure.end is not None:
        verb = "raised " if failure.end.how is EndKind.RAISED else ""
        who = f"rank {failure.rank}{', which only waited,' if failure.only_waited else ''}"
        sentences.append(f"{who} {verb}{describe_end(failure.end)}")
    if failure.disagreement is not None:
        sentences.append(describe_disagreement(failure.disagreement))
    return ". ".join(sentences)


def _describe_status(status: int | None) -> str:
    """Return the exit status of a process in words; a negative status is minus a signal number."""
    if status is None:
        return "still runs"
    if status >= 0:
        return f"ended with status {status}"
    return describe_end(RankEnd(how=EndKind.KILLED, signal=-status))


def _name_signal(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
