"""The losses of two runs beside a gradient that no hypothesis explains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from moeverify.report.words.cause import describe_cause
from moeverify.results.checks import CheckName
from moeverify.results.finding import make_finding
from moeverify.scripts.compare.losses import find_losses
from moeverify.scripts.record.lines import Header, Rows
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.train.calls.call import LoopCall

Passes = Sequence[tuple[tuple[int, ...], float]]


def make_run(*ranks: Passes) -> RecordedRun:
    """Return a run whose ranks make these forward passes, with their rows and losses, in step 0."""
    records = []
    for number, passes in enumerate(ranks):
        record = RankRecord(Header(rank=number, world_size=len(ranks), first=0, last=0), Path("run"), None)
        for place, (rows, loss) in enumerate(passes):
            shape = (len(rows), 8)
            record.rows.append(Rows(step=0, forward=place, name="0", shape=shape, rows=rows))
            record.calls.append(LoopCall(step=0, name="backward", losses=(loss,)))
        records.append(record)
    return RecordedRun(Path("run"), records)


ONE = make_run([((1, 2), 2.0), ((3, 4), 3.0)])


@pytest.mark.parametrize(
    ("actual", "differ", "rank", "words"),
    [
        # Ranks with the same rows: each pass is compared.
        (make_run(*[[((1, 2), 2.0), ((3, 4), 3.0)]] * 2), False, None, "backward pass"),
        (make_run([((1, 2), 2.0), ((3, 4), 3.0)], [((1, 2), 2.0), ((3, 4), 3.1)]), True, 1, "forward pass"),
        # Ranks with other passes: the sums of a step are compared.
        (make_run([((1, 3), 5.0)], [((2, 4), 5.0)]), False, None, "backward pass"),
        (make_run([((1, 3), 5.0)], [((2, 4), 5.2)]), True, None, "number of tokens"),
    ],
)
def test_losses_tell_the_passes_apart(
    actual: RecordedRun, differ: bool, rank: int | None, words: str
) -> None:
    seen = find_losses(ONE, actual, 0)
    assert seen is not None
    assert (seen.differ, seen.rank) == (differ, rank)
    finding = make_finding(CheckName.GRADIENT, "weight", 0, (0, 1), None, error=1.0)
    cause = describe_cause(finding.model_copy(update={"unexplained": ("weight",), "observations": (seen,)}))
    assert words in cause


def test_losses_that_are_nearly_equal_or_have_no_rows_say_nothing() -> None:
    assert find_losses(ONE, make_run([((1, 2), 2.0), ((3, 4), 3.00005)]), 0) is None
    unknown = make_run([((1, 2), 2.0)])
    unknown.ranks[0].rows.clear()
    assert find_losses(unknown, unknown, 0) is None
