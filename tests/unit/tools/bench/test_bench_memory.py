"""Memory reserved for CUDA graphs counts as used, also when it holds no tensor between two launches."""

from __future__ import annotations

import pytest
import torch

from moeverify.tools.bench.measure import PeakMemory


def make_segment(pool: tuple[int, int], total: int, allocated: int, device: int = 0) -> dict[str, object]:
    return {
        "segment_pool_id": pool,
        "total_size": total,
        "allocated_size": allocated,
        "device": device,
    }


def test_idle_memory_of_graphs_is_a_part_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        make_segment((0, 0), 500, 100),
        make_segment((0, 1), 64, 24),
        make_segment((0, 2), 32, 32),
        make_segment((0, 1), 16, 0),
        make_segment((0, 1), 1000, 0, device=1),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 200)
    with PeakMemory(torch.device("cuda", 0)) as memory:
        pass
    assert memory.peak == 200 + 40 + 16
