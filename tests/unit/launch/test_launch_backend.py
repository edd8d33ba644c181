"""Which backend and which GPU the ranks of a job take, on machines with any number of GPUs."""

from __future__ import annotations

import pytest

from moeverify.controller import machine
from moeverify.controller.machine import describe_environment, find_limit
from moeverify.launch.backend import choose_backend, choose_gpu
from moeverify.launch.plan import Backend, Device
from moeverify.report.words.note import describe_sharing


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        ("auto", "cpu", "gloo"),
        ("nccl", "cpu", "gloo"),
        ("auto", "cuda", "nccl"),
        ("gloo", "cuda", "gloo"),
        ("nccl", "cuda", "nccl"),
    ],
)
def test_nccl_carries_the_collectives_of_gpus_unless_gloo_is_asked_for(
    wanted: Backend, device: Device, expected: str
) -> None:
    assert choose_backend(wanted, device) == expected


def test_ranks_are_spread_over_the_gpus() -> None:
    assert [choose_gpu(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [choose_gpu(rank, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert [choose_gpu(rank, 8) for rank in range(4)] == [0, 1, 2, 3]


def test_only_gloo_lets_ranks_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 1)
    monkeypatch.setattr(machine, "_available_memory", lambda: 64 * 2**30)
    for backend in ("auto", "nccl"):
        limit = find_limit("cuda", backend=backend)  # type: ignore[arg-type]
        assert (limit.most, limit.by) == (1, "gpus")
    shared = find_limit("cuda", backend="gloo")
    assert shared.by == "memory"
    assert shared.most >= 8


def test_the_report_says_that_ranks_share_a_gpu() -> None:
    (note,) = describe_sharing(4, 1, is_external=False)
    assert note == "4 ranks share one GPU: collectives by gloo, so this is no verdict about NCCL"
    assert describe_sharing(2, 2, is_external=False) == ()
    assert describe_sharing(2, 0, is_external=False) == ()
    assert describe_sharing(16, 8, is_external=True) == ()


def test_the_environment_names_the_backend_that_was_used() -> None:
    assert describe_environment("cuda")["backend"] == "nccl"
    assert describe_environment("cuda", "gloo, nccl")["backend"] == "gloo, nccl"
