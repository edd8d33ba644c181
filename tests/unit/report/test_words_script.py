"""Messages of `moeverify watch` about a script's steps and the steps to record."""

from __future__ import annotations

import pytest

from moeverify.report.words.script import describe_recorded


@pytest.mark.parametrize(
    ("steps", "end"),
    [
        ({0: 4, 1: 4}, "2 ranks recorded in out"),
        (
            {0: None, 1: None},
            "; cut off: ranks 0, 1; steps that were complete can be compared",
        ),
        (
            {0: 4, 1: None},
            "2 ranks recorded in out; cut off: rank 1; steps that were complete can be compared",
        ),
        ({1: 0, 0: 0}, "no optimizer of torch has stepped on any rank, so there is nothing to compare"),
        ({0: 4, 1: 0}, "no optimizer of torch has stepped on rank 1, so there is nothing to compare"),
        (
            {0: 2, 1: 2},
            "but rank 0 made 2 optimizer steps, and --steps 2-3 begins after that: nothing to compare",
        ),
        ({0: 4, 1: 3}, "; rank 1 made 3 optimizer steps of --steps 2-3"),
    ],
)
def test_what_was_recorded_is_told_from_what_was_not(steps: dict[int, int | None], end: str) -> None:
    text = describe_recorded("out", steps, 2, 3)
    assert text.partition(": the script never steps")[0].endswith(end)
