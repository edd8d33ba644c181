"""Sentences beside a verdict that no other test reads."""

from __future__ import annotations

from moeverify.report.words.note import describe_unused_loop


def test_a_pass_of_an_own_model_says_that_its_loop_was_not_run() -> None:
    (note,) = describe_unused_loop("pass", is_own_model=True)
    for part in ("data loading", "zero_grad", "clip", "schedule", "moeverify watch"):
        assert part in note
    assert not describe_unused_loop("mismatch", is_own_model=True)
    assert not describe_unused_loop("pass", is_own_model=False)
