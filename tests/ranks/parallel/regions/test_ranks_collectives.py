"""Collectives that carry gradients compute their definitions for any memory order of a tensor."""

from __future__ import annotations

from pathlib import Path

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job


def test_collectives_and_their_gradients_in_every_order_of_memory(tmp_path: Path) -> None:
    entry = str(Path(__file__).with_name("trades.py"))
    (outcome,) = run_jobs([Job(name="trades", num_ranks=2)], entry=entry, folder=tmp_path)
    assert outcome.result is not None, outcome
    assert len(outcome.result) == 18
    assert {title: wrong for title, wrong in outcome.result.items() if any(wrong)} == {}
