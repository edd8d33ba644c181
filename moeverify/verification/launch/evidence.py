"""Reports of the ranks of a failed job, built from the files that the ranks left. Does not import torch."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moeverify.results.failure import EndKind, ProcessState, RankEnd
from moeverify.results.run import RankReport
from moeverify.results.trace import CollectiveRecord
from moeverify.verification.collectives.flight_recorder import read_flight
from moeverify.verification.launch.failure_root_cause import RootCause, find_root_cause
from moeverify.verification.launch.tracebacks import trim_stack

_OUTPUT = "The end of its stderr:"
_POINTS_UP = re.compile(r"\babove\b")
_TAIL = 4000
_MOST_LINES = 12  # of stderr, behind a stack
# States of a process that cannot respond, by their letter in /proc/PID/stat; see proc(5).
_FROZEN: Mapping[str, ProcessState] = {"T": "stopped", "t": "traced", "D": "uninterruptible"}


@dataclass(frozen=True)
class Death:
    """The end of a launch.

    `first` is the first failed rank according to elastic, and `exits` the exit status by rank. A negative
    status is minus the signal number. `error` is the traceback of the launcher and `agent` its exit status.
    `frozen` holds the ranks that were stopped, traced or in uninterruptible sleep when their stacks were
    requested. `gone` holds ranks that have no process and left no other information.
    """

    agent: int | None = None
    first: int | None = None
    exits: Mapping[int, int] = field(default_factory=dict)
    error: str = ""
    frozen: Mapping[int, ProcessState] = field(default_factory=dict)
    gone: Collection[int] = ()


def read_death(launch_folder: Path, agent: int | None, frozen: Mapping[int, ProcessState]) -> Death:
    """Return how the launch ended, from the `launch.json` of its agent and the given values."""
    content = _read_json(launch_folder / "launch.json")
    return Death(
        agent=agent,
        first=content.get("first"),
        exits={int(rank): int(status) for rank, status in content.get("exits", {}).items()},
        error=content.get("error", ""),
        frozen=frozen,
    )


def collect_reports(
    launch_folder: Path, folder: Path | None, ranks: Sequence[int], death: Death, *, is_watched: bool = False
) -> RootCause:
    """Return the origin of the failure, with one report for each of `ranks`.

    `folder` is the folder of the job, or None if the launch failed before a job began. `is_watched` is for a
    script of the user; see `find_root_cause`.
    """
    reports, times, records = [], {}, {}
    for rank in ranks:
        records[rank] = read_flight(launch_folder / f"rank-{rank}.flight")
        path = folder / f"rank-{rank}.json" if folder is not None else None
        report = _read_report(path) if path is not None else None
        report = report and _with_output(report, launch_folder)
        if path is not None and report is not None:
            times[rank] = path.stat().st_mtime
        reports.append(report or _infer_report(launch_folder, rank, death, records[rank]))
    return find_root_cause(reports, times, records, is_watched=is_watched)


def read_frozen(pid: int) -> ProcessState | None:
    """Return the state of a process that cannot respond, or None if it can or does not exist."""
    return _FROZEN.get(_read_letter(pid))


def read_pid(launch_folder: Path, rank: int) -> int | None:
    """Return the process id of a rank, or None if it did not write one."""
    pid = _read_json(launch_folder / f"rank-{rank}.json").get("pid")
    return pid if isinstance(pid, int) else None


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not read its exit status yet."""
    try:
        os.kill(pid, 0)
    except OSError:  # no process has the id, or one of another user has it now
        return True
    return _read_letter(pid) in ("Z", "X")


def _read_letter(pid: int) -> str:
    """Return the letter of a process's state, see proc(5), or an empty string if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def read_tail(path: Path) -> str:
    """Return the last 4000 bytes of a text file, or an empty string if the file does not exist."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return data[-_TAIL:].decode(errors="replace").strip("\0 \n")


def _read_report(path: Path) -> RankReport | None:
    try:
        return RankReport.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        return None


def _with_output(report: RankReport, launch_folder: Path) -> RankReport:
    """Return a report with the end of the rank's stderr, if its error points to text above it."""
    if report.end is None or not _POINTS_UP.search(report.end.error):
        return report
    written = read_tail(launch_folder / f"rank-{report.rank}.err").splitlines()[-_MOST_LINES:]
    stack = "\n".join([report.stack, "", _OUTPUT, *written]) if written else report.stack
    return report.model_copy(update={"stack": stack})


def _infer_report(
    launch_folder: Path, rank: int, death: Death, records: Sequence[CollectiveRecord]
) -> RankReport:
    """Return the report of a rank that wrote no report itself."""
    dump = _read_dump(launch_folder / f"rank-{rank}.stack")
    errors = read_tail(launch_folder / f"rank-{rank}.err")
    end = _infer_end(rank, dump, errors, death)
    identity = _read_json(launch_folder / f"rank-{rank}.json")
    stack = trim_stack(dump)
    if errors and (not dump or end.how in (EndKind.KILLED, EndKind.CRASHED, EndKind.EXITED, EndKind.GONE)):
        stack = f"{stack}\n\n{_OUTPUT}\n{errors}".strip()
    return RankReport.of(
        rank,
        end,
        host=identity.get("host", ""),
        pid=identity.get("pid", 0),
        stack=stack,
        collective=records[-1] if records else None,
    )


def _infer_end(rank: int, dump: str, errors: str, death: Death) -> RankEnd:
    """Return how a rank ended, by the first rule that applies."""
    status = death.exits.get(rank)
    code = status or 0
    last_error = errors.splitlines()[-1][:500] if errors else ""
    rules = (
        (dump.startswith("Timeout ("), RankEnd(how=EndKind.HOLDS_LOCK)),
        (rank in death.frozen, RankEnd(how=EndKind.FROZEN, process_state=death.frozen.get(rank))),
        (code == -signal.SIGTERM and rank != death.first, RankEnd(how=EndKind.STOPPED)),
        (code < 0, RankEnd(how=EndKind.KILLED, signal=-code)),
        (
            code > 0 and "Traceback (most recent call last)" in errors,
            RankEnd(how=EndKind.RAISED, error=last_error),
        ),
        (status is not None, RankEnd(how=EndKind.EXITED, status=status)),
        (
            dump.startswith("Fatal Python error"),
            RankEnd(how=EndKind.CRASHED, error=dump.partition("\n")[0]),
        ),
        (bool(dump), RankEnd(how=EndKind.STOPPED_WITH_LAUNCH)),
        (rank in death.gone, RankEnd(how=EndKind.LEFT)),
    )
    return next((end for holds, end in rules if holds), RankEnd(how=EndKind.GONE))


def _read_dump(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace").strip("\0 \n")
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content
