"""Groups of meshes: the right ranks on every axis, as few groups as needed, separate groups for experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job

# Groups needed per rank: its own, and one for each set of ranks that is neither one rank nor all.
LAYOUTS = [
    ({"dp_shard": 4, "data_parallel": "fsdp2"}, 1),
    ({"dp_shard": 2, "tp": 2, "data_parallel": "fsdp2", "ep": 2}, 5),
    ({"dp_replicate": 2, "dp_shard": 2, "data_parallel": "fsdp2", "ep": 2}, 4),
    ({"dp_shard": 2, "cp": 2, "data_parallel": "fsdp2"}, 3),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Any]:
    """Return the reports of four ranks for each layout."""
    jobs = [Job(name=str(layout), num_ranks=4, payload={"layout": layout}) for layout, _ in LAYOUTS]
    entry = str(Path(__file__).with_name("groups.py"))
    outcomes = list(run_jobs(jobs, entry=entry, folder=tmp_path_factory.mktemp("groups")))
    assert [outcome.state for outcome in outcomes] == ["done"] * len(LAYOUTS), outcomes
    return {outcome.index: outcome.result for outcome in outcomes}


@pytest.mark.parametrize(
    "number", range(len(LAYOUTS)), ids=[" ".join(map(str, layout)) for layout, _ in LAYOUTS]
)
def test_groups(number: int, found: Mapping[int, Any]) -> None:
    assert found[number] == {"wrong": [], "made": LAYOUTS[number][1]}
