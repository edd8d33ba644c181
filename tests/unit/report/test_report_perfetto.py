"""The trace for Perfetto: a process for each rank of a failed case, and an event for each collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report_cases import TIMELINE, make_failing

from moeverify.report.formats.perfetto import write


def test_each_collective_is_an_event_of_its_rank(make_run: Any, make_case: Any, tmp_path: Path) -> None:
    case = make_failing()
    run = make_run(make_case("a"), case, case.model_copy(update={"name": "again"}))
    write(run, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    named = [each for each in trace["traceEvents"] if each["ph"] == "M"]
    events = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    num_ranks = len(TIMELINE.ranks)
    assert [each["pid"] for each in named] == list(range(2 * num_ranks))
    assert named[1]["args"]["name"] == f"{case.name}, rank 1, step {TIMELINE.step}"
    assert named[-1]["args"]["name"] == f"again, rank {num_ranks - 1}, step {TIMELINE.step}"
    assert len(events) == 2 * sum(map(len, TIMELINE.ranks))
    first, kind = TIMELINE.ranks[0][0], TIMELINE.kinds[TIMELINE.ranks[0][0].kind]
    assert events[0]["name"] == f"{kind.op} over {kind.axis}"
    assert events[0]["args"]["module"] == kind.module
    assert events[0]["ts"] == first.started * 1e6
    assert events[0]["dur"] == (first.seconds or 0) * 1e6
    assert trace["otherData"]["verdict"] == run.verdict
