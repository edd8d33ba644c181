"""`--timings`: the stages of a run add up to its time, and the slowest cases come first."""

from __future__ import annotations

import re
from typing import Any

from moeverify.report.timings import render_timings
from moeverify.results.run import GoldenTime, TimePart


def test_the_stages_add_up_to_the_run(make_run: Any, make_case: Any, print_at: Any) -> None:
    cases = [make_case(f"case-{number}", seconds=float(number)) for number in range(1, 13)]
    slow = make_case("slow", "mismatch", seconds=40.0, stages=(TimePart(name="second run", seconds=7.5),))
    run = make_run(
        *cases, slow, seconds=141.3, start_seconds=5.0, goldens=(GoldenTime(recipe="tiny", seconds=2.0),)
    )
    text = print_at(lambda console: render_timings(run, console), width=120, terminal=False)
    rows = [tuple(re.split(r"\s{2,}", line)) for line in text.splitlines()[1:] if line]
    assert [row[0] for row in rows[:4]] == ["start of the ranks", "golden tiny", "case slow", "case case-12"]
    assert rows[2] == ("case slow", "40.0", "second run 7.5")
    assert rows[-2] == ("3 faster cases", "6.0")  # 1 + 2 + 3
    assert rows[-1][:2] == ("the rest", "16.3")  # 141.3 - 5 - 2 - 40 - 78
