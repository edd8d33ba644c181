"""Messages that go through copies on the CPU arrive unchanged, and later ones do not use copies."""

from __future__ import annotations

from pathlib import Path

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job

ENTRY = Path(__file__).parent / "programs" / "messages.py"


def test_what_is_staged_arrives(tmp_path: Path) -> None:
    (outcome,) = run_jobs(
        [Job(name="messages", num_ranks=2, timeout=60.0)], entry=str(ENTRY), folder=tmp_path
    )
    assert outcome.state == "done", outcome.failure
    assert outcome.result is not None
    assert outcome.result["received"] == [[2.0] * 3, [[5.0, 5.0]] * 2, [7.0], [6.0], [8.0]]
    assert outcome.result["collectives"] == [
        [[[0.0, 2.0], [1.0, 3.0], [1.0, 3.0], [2.0, 4.0]], [0, 1]],
        [[[1.0, 5.0]], [2.0, 2.0]],
        [[[1.0, 5.0], [3.0, 7.0]], [3]],
    ]
    # Each once: the copies that gloo exchanges are no collectives of the program.
    assert outcome.result["recorded"] == [
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
        "all_reduce_coalesced",
    ]
