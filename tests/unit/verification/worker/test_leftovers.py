"""Detection of what functions of users change in their process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moeverify.verification.worker.leftovers import ProcessSettings, ProcessState

pytestmark = pytest.mark.slow

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
def test_changes_are_found_and_settings_are_restored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, settings = ProcessState(), ProcessSettings()
    state.note_functions()
    monkeypatch.setattr(torch.nn, "cache_of_a_library", lambda: None, raising=False)  # had no value before
    monkeypatch.setattr(sys, "excepthook", dist.get_rank)  # by torch, as `init_process_group` does
    torch.nn.Linear(2, 2)(torch.ones(2)).sum().backward()
    assert state.find_lasting_changes() == []
    is_function = name in ("torch.distributed.all_reduce", "Linear.forward")
    try:
        CHANGES[name](monkeypatch)
        assert settings.find_changes() == ([] if is_function else [name])
    finally:
        lasting = state.find_lasting_changes()
    assert lasting == ([name] if is_function else [])
    assert torch.empty(2).device.type == "cpu"
    assert torch.empty(2).dtype == torch.float32
