"""torch's caches about a mesh do not outlive its job, unless the next job may use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Device, Job


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_meshes_of_two_jobs(
    device: Device, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    # An entry that is a module is imported before the fork, as `moeverify.verification.worker.main` is, with torch.
    monkeypatch.syspath_prepend(programs)
    jobs = [
        Job(name=f"{number} groups", num_ranks=4, payload={"num_groups_before": number})
        for number in (3, 0, 2)
    ]
    outcomes = list(run_jobs(jobs, entry="equal_meshes", folder=tmp_path, device=device))
    assert [(outcome.state, outcome.failure) for outcome in outcomes] == [("done", None)] * 3
    at_least_213 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    # The gradient is x / |x|, and the norm of its squares sqrt(2 * (1 + 16 + 81 + 256)) / 60.
    expected = {
        "norm": pytest.approx(60**0.5),
        "norm of the gradient": pytest.approx(708**0.5 / 60),
        # Torch 2.11 keeps two for each equal mesh in compiled objects; no later result has them.
        "old_meshes": 0 if at_least_213 else ANY,
        "mesh of the gradient": "new",
    }
    assert [outcome.result for outcome in outcomes] == [expected] * 3


def test_what_is_known_of_equal_meshes_stays_while_groups_have_the_same_names(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(programs)
    two, stays = {"num_groups_before": 2}, {"keeps_meshes": True}
    asked: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
        ({}, stays, True),
        ({}, stays, False),
        (two, stays, True),  # the same ranks in groups of other names
        (two, stays, False),
        (two, {}, True),  # does not promise to admit its meshes
        (two, stays, True),
        ({"adds_mesh": True, **two}, stays, True),
        (two, stays, True),  # the previous job had a mesh that it did not admit
        (two, stays, False),
    ]
    jobs = [
        Job(name=str(number), num_ranks=4, payload=payload, **fields)
        for number, (payload, fields, _) in enumerate(asked)
    ]
    outcomes = list(run_jobs(jobs, entry="kept_meshes", folder=tmp_path))
    assert [outcome.failure for outcome in outcomes] == [None] * len(asked)
    # Two of (1, 1) and (2, 2), or all four ranks; groups of previous jobs would have threads.
    assert [outcome.result for outcome in outcomes] == [
        {"squared": 60.0 if "adds_mesh" in payload else 10.0, "found anew": anew, "groups of old meshes": 0}
        for payload, _, anew in asked
    ]
