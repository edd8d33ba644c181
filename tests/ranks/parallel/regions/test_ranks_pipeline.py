"""Two pipeline stages train like one device under every schedule: loss, gradients, state, tied embedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Return the reports of both ranks for each recipe and schedule."""
    entry = str(Path(__file__).with_name("pipelines.py"))
    (outcome,) = run_jobs(
        [Job(name="pipelines", num_ranks=2)], entry=entry, folder=tmp_path_factory.mktemp("pipelines")
    )
    assert outcome.result is not None, outcome
    return outcome.result


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", ["untied", "tied"])
def test_stages_compute_what_one_device_computes(
    recipe: str, schedule: str, found: Mapping[str, Any]
) -> None:
    assert [rank["wrong"] for rank in found[f"{recipe} {schedule}"]] == [[], []]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", ["untied", "tied"])
def test_a_step_that_is_measured_is_the_step_that_is_verified(
    recipe: str, schedule: str, found: Mapping[str, Any]
) -> None:
    assert [rank["wrong unwatched"] for rank in found[f"{recipe} {schedule}"]] == [[], []]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", ["untied", "tied"])
def test_the_ranks_together_show_everything(recipe: str, schedule: str, found: Mapping[str, Any]) -> None:
    first, second = found[f"{recipe} {schedule}"]
    alone = set(found[f"{recipe} alone"][0]["shown"])
    assert set(first["shown"]) | set(second["shown"]) == alone
    assert set(first["shown"]) != alone  # else nothing was divided
    assert "gradient_norm/total" in set(first["shown"]) & set(second["shown"])


def test_each_rank_holds_the_layers_of_its_stages(found: Mapping[str, Any]) -> None:
    assert [rank["layers"] for rank in found["untied 1f1b"]] == [["0"], ["1"]]
    assert [rank["layers"] for rank in found["untied interleaved_1f1b"]] == [["1"], ["0"]]
    assert [rank["layers"] for rank in found["untied zbv"]] == [[], ["0", "1"]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_of_a_tied_embedding_stay_equal_bit_for_bit(schedule: str, found: Mapping[str, Any]) -> None:
    copies = [copy for rank in found[f"tied {schedule}"] for copy in rank["embed"]]
    assert len(copies) == 2
    assert copies[0] == copies[1]
    untied = [copy for rank in found[f"untied {schedule}"] for copy in rank["embed"]]
    assert len(untied) == 1
