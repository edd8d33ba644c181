"""What torch caches about a mesh does not outlive its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import Job


def test_equal_meshes_of_two_jobs(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An entry that is a module is imported before the fork, as `moeverify.suite.worker` is, and torch with it.
    monkeypatch.syspath_prepend(programs)
    jobs = [
        Job(name=f"{number} groups", num_ranks=4, payload={"num_groups_before": number})
        for number in (3, 0, 2)
    ]
    outcomes = list(run_jobs(jobs, entry="equal_meshes", folder=tmp_path))
    assert [(outcome.state, outcome.summary) for outcome in outcomes] == [("done", "")] * 3
    expected = {"norm": pytest.approx(60**0.5), "old_meshes": 0}
    assert [outcome.result for outcome in outcomes] == [expected] * 3
