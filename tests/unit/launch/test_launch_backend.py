"""Which backend and which GPU the ranks of a job take, on machines with any number of GPUs."""

from __future__ import annotations

import pytest

from moeverify.controller import machine
from moeverify.controller.machine import describe_environment, find_limit
from moeverify.launch.backend import choose_backend, choose_gpu
from moeverify.launch.plan import Backend, Device
from moeverify.report.words.note import describe_sharing


@pytest.mark.parametrize(
    ("wanted", "device", "num_ranks", "num_gpus", "expected"),
    [
        ("auto", "cpu", 4, 0, "gloo"),
        ("nccl", "cpu", 1, 8, "gloo"),
        ("auto", "cuda", 1, 1, "nccl"),
        ("auto", "cuda", 2, 2, "nccl"),
        ("auto", "cuda", 2, 1, "gloo"),
        ("auto", "cuda", 8, 4, "gloo"),
        ("gloo", "cuda", 2, 2, "gloo"),
        ("nccl", "cuda", 2, 1, "nccl"),
    ],
)
def test_nccl_carries_collectives_where_each_rank_has_a_gpu(
    wanted: Backend, device: Device, num_ranks: int, num_gpus: int, expected: str
) -> None:
    assert choose_backend(wanted, device, num_ranks=num_ranks, num_gpus=num_gpus) == expected


def test_ranks_are_spread_over_the_gpus() -> None:
    assert [choose_gpu(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [choose_gpu(rank, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert [choose_gpu(rank, 8) for rank in range(4)] == [0, 1, 2, 3]


def test_only_nccl_limits_the_ranks_to_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 1)
    monkeypatch.setattr(machine, "_available_memory", lambda: 64 * 2**30)
    assert find_limit("cuda", backend="nccl").most == 1
    assert find_limit("cuda", backend="nccl").by == "gpus"
    for backend in ("auto", "gloo"):
        limit = find_limit("cuda", backend=backend)  # type: ignore[arg-type]
        assert limit.by == "memory"
        assert limit.most >= 8


def test_the_report_says_that_ranks_share_a_gpu() -> None:
    (note,) = describe_sharing(4, 1, is_external=False)
    assert note == "4 ranks share one GPU: collectives by gloo, so this is no verdict about NCCL"
    assert describe_sharing(2, 2, is_external=False) == ()
    assert describe_sharing(2, 0, is_external=False) == ()
    assert describe_sharing(16, 8, is_external=True) == ()


def test_the_environment_names_the_backend_that_was_used() -> None:
    assert describe_environment("cuda")["backend"] == "nccl"
    assert describe_environment("cuda", "gloo, nccl")["backend"] == "gloo, nccl"
