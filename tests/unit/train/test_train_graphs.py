"""Graphs under a backend whose collectives pass through the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moeverify.cases.schema import Layout
from moeverify.errors import CaseError
from moeverify.train.assemble import _capture_micro_batches

GRAPHS = Layout(dp_shard=2, reshard="step", graphs="micro_batch")


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_graphs_hold_the_collectives_of_nccl(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    assert _capture_micro_batches(GRAPHS, torch.device("cuda")) is not None
    assert _capture_micro_batches(Layout(dp_shard=2), torch.device("cuda")) is None


def test_graphs_over_gloo_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    with pytest.raises(CaseError, match="collectives of gloo") as caught:
        _capture_micro_batches(GRAPHS, torch.device("cuda"))
    assert caught.value.problems[0].path == "layout.graphs"
    alone = Layout(reshard="step", graphs="micro_batch")
    assert _capture_micro_batches(alone, torch.device("cuda")) is not None
