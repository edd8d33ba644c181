"""Regions match torch's placement on each rank: DTensors, FSDP2 over TP, HSDP, FSDP1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job

TITLES = [
    "distributed",
    "packed",
    *(
        f"{name} {width}"
        for width in (8, 5)
        for name in ("tp", "fsdp2 + tp", "hsdp", "fsdp2 on the last dim", "fsdp1")
    ),
]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Return the errors of all four ranks."""
    entry = str(Path(__file__).with_name("placements.py"))
    (outcome,) = run_jobs(
        [Job(name="placements", num_ranks=4)], entry=entry, folder=tmp_path_factory.mktemp("layout")
    )
    assert outcome.result is not None, outcome
    return outcome.result


@pytest.mark.parametrize("title", TITLES)
def test_regions_are_what_torch_holds(title: str, wrong: Mapping[str, Any]) -> None:
    assert wrong[title] == []


def test_nothing_was_left_out(wrong: Mapping[str, Any]) -> None:
    assert set(wrong) == set(TITLES)
