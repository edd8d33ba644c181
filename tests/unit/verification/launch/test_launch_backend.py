"""Backend and GPU choice for the ranks of a job, on machines with any number of GPUs."""

from __future__ import annotations

import pytest

from moeverify.report.words.note import describe_sharing
from moeverify.verification.controller import machine
from moeverify.verification.controller.machine import Machine, find_limit
from moeverify.verification.launch.backend import choose_backend, choose_gpu
from moeverify.verification.launch.plan import Backend, Device


@pytest.mark.parametrize(
    ("wanted", "device", "num_ranks", "expected"),
    [
        ("auto", "cpu", 2, "gloo"),
        ("nccl", "cpu", 2, "gloo"),
        ("auto", "cuda", 2, "nccl"),
        ("auto", "cuda", 3, "gloo"),
        ("gloo", "cuda", 2, "gloo"),
        ("nccl", "cuda", 3, "nccl"),
    ],
)
def test_gloo_carries_the_collectives_of_ranks_that_share_one_of_two_gpus(
    wanted: Backend, device: Device, num_ranks: int, expected: str
) -> None:
    assert choose_backend(wanted, device, num_ranks=num_ranks, num_gpus=2) == expected


def test_ranks_are_spread_over_the_gpus() -> None:
    assert [choose_gpu(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [choose_gpu(rank, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert [choose_gpu(rank, 8) for rank in range(4)] == [0, 1, 2, 3]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 1)
    monkeypatch.setattr(machine, "_available_memory", lambda: 64 * 2**30)


@pytest.mark.usefixtures("one_gpu")
def test_ranks_share_a_gpu_unless_nccl_is_asked_for() -> None:
    refused = find_limit("cuda", backend="nccl")
    assert (refused.most, refused.by) == (1, "gpus")
    sharing: tuple[Backend, ...] = ("auto", "gloo")
    for backend in sharing:
        shared = find_limit("cuda", backend=backend)
        assert shared.by == "memory"
        assert shared.most >= 8


@pytest.mark.usefixtures("one_gpu")
def test_the_environment_names_the_backends_of_the_cases_that_ran() -> None:
    found = Machine.find("auto")
    assert found.device == "cuda"
    assert found.describe([1, 1])["backend"] == "nccl"
    assert found.describe([1, 2, 4])["backend"] == "gloo, nccl"
    assert Machine.find("auto", "gloo").describe([1])["backend"] == "gloo"
    assert "gloo where ranks share" in found.describe([])["backend"]


@pytest.mark.usefixtures("one_gpu")
def test_ranks_of_another_launcher_are_taken_to_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "8")
    assert Machine.find("cuda").choose_backend(8) == "nccl"
    assert Machine.find("cuda", "gloo").choose_backend(8) == "gloo"


def test_the_report_says_that_ranks_share_a_gpu() -> None:
    (note,) = describe_sharing(4, 1, is_external=False)
    assert note == "4 ranks share one GPU: collectives by gloo, so this is no verdict about NCCL"
    assert describe_sharing(2, 2, is_external=False) == ()
    assert describe_sharing(2, 0, is_external=False) == ()
    assert describe_sharing(16, 8, is_external=True) == ()
