"""Messages that are sent through copies on the CPU arrive as they were, and later ones go their own way again."""

from __future__ import annotations

from pathlib import Path

from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import Job

ENTRY = Path(__file__).parent / "programs" / "messages.py"


def test_messages_arrive_through_copies(tmp_path: Path) -> None:
    (outcome,) = run_jobs(
        [Job(name="messages", num_ranks=2, timeout=60.0)], entry=str(ENTRY), folder=tmp_path
    )
    assert outcome.state == "done", outcome.failure
    assert outcome.result is not None
    assert outcome.result["received"] == [[2.0] * 3, [[5.0, 5.0]] * 2, [7.0], [8.0]]
