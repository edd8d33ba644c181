"""The collectives of each failed case as a trace of Chrome's JSON format, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from moeverify.report.files import write_atomically
from moeverify.results.run import CaseResult, RunResult

_PER_SECOND = 1e6  # times are microseconds


def write(run: RunResult, path: Path) -> None:
    """Write the timelines of all cases that have one, atomically; only cases with differences do.

    Raises: OSError when writing fails.
    """
    processes = count()
    events = [event for case in run.cases for event in _list_events(case, processes)]
    about = {"verdict": run.verdict, "command": run.command, "started": run.started, **run.environment}
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))


def format_address(case: CaseResult) -> str:
    """Return the timeline of a case as a `data:` address of a compressed trace; empty if it has none."""
    if case.timeline is None:
        return ""
    trace = json.dumps({"traceEvents": list(_list_events(case, count())), "displayTimeUnit": "ms"})
    packed = base64.b64encode(gzip.compress(trace.encode(), mtime=0))
    return f"data:application/gzip;base64,{packed.decode()}"


def _list_events(case: CaseResult, processes: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield the events of a case: one process for each rank, and one complete event for each collective."""
    if case.timeline is None:
        return
    for rank, collectives in enumerate(case.timeline.ranks):
        process = next(processes)
        name = f"{case.name}, rank {rank}, step {case.timeline.step}"
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        for each in collectives:
            kind = case.timeline.kinds[each.kind]
            yield {
                "ph": "X",
                "name": f"{kind.op} over {kind.axis}",
                "cat": kind.direction or "outside of modules",
                "pid": process,
                "tid": 0,
                "ts": each.started * _PER_SECOND,
                "dur": (each.seconds or 0.0) * _PER_SECOND,
                "args": {"module": kind.module, "ended": each.seconds is not None},
            }
