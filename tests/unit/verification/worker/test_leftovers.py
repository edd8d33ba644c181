"""Detection of what functions of users change in their process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moeverify.verification.worker.leftovers import ProcessState

Change = Callable[[pytest.MonkeyPatch], object]


def handle(patch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)


CHANGES: dict[str, Change] = {
    "torch default dtype": lambda patch: torch.set_default_dtype(torch.bfloat16),
    "torch default device": lambda patch: torch.set_default_device("meta"),
    "torch gradient mode": lambda patch: torch.set_grad_enabled(False),
    "torch anomaly mode": lambda patch: torch.autograd.set_detect_anomaly(True),
    "torch deterministic mode": lambda patch: torch.use_deterministic_algorithms(True),
    "torch precision of products": lambda patch: torch.set_float32_matmul_precision("medium"),
    "torch autocast": lambda patch: torch.set_autocast_enabled("cpu", True),
    "working directory": lambda patch: patch.chdir("/"),
    "signal handlers": handle,
    "torch.distributed.all_reduce": lambda patch: patch.setattr(dist, "all_reduce", lambda *_: None),
    "Linear.forward": lambda patch: patch.setattr(torch.nn.Linear, "forward", lambda *_: None),
}


@pytest.fixture
def _restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, handler = ProcessState(), signal.getsignal(signal.SIGTERM)
    state.note_functions()
    monkeypatch.setattr(torch.nn, "cache_of_a_library", lambda: None, raising=False)  # had no value before
    monkeypatch.setattr(sys, "excepthook", dist.get_rank)  # by torch, as `init_process_group` does
    torch.nn.Linear(2, 2)(torch.ones(2)).sum().backward()
    assert state.find_changes() == []
    try:
        CHANGES[name](monkeypatch)
        assert name in state.find_changes()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_autocast_enabled("cpu", False)
        signal.signal(signal.SIGTERM, handler)
