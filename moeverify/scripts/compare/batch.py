"""Check that both runs saw the same global batch at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moeverify.results.finding import Finding, make_finding
from moeverify.results.observation import OtherPasses
from moeverify.results.script import BatchFacts, ScriptCheck
from moeverify.scripts.record.read import RankRecord, RecordedRun


def find_other_rows(expected: RecordedRun, actual: RecordedRun, steps: list[int]) -> Iterator[Finding]:
    """Yield a finding for each step and model input whose rows differ between the runs.

    Ranks with identical rows count once: they share the work on them (tensor or expert parallelism). Steps
    in which a pass has no recorded inputs are left out.
    """
    unknown = _list_unknown(expected) | _list_unknown(actual)
    for step in (step for step in steps if step not in unknown):
        for name in _list_inputs(expected, step):
            wanted, found = _global_rows(expected, step, name), _global_rows(actual, step, name)
            # Rows of other lengths (context parallelism) or of unnamed inputs are not comparable.
            if (
                wanted
                and found
                and wanted != found
                and _shape(expected, step, name) == _shape(actual, step, name)
            ):
                yield _make_finding(actual, step, name, wanted, found)


def count_inputs(expected: RecordedRun, actual: RecordedRun, steps: list[int]) -> int:
    """Return the number of compared model inputs over all steps."""
    return sum(
        bool(_global_rows(actual, step, name)) and _shape(expected, step, name) == _shape(actual, step, name)
        for step in steps
        for name in _list_inputs(expected, step)
    )


def find_other_passes(expected: RecordedRun, actual: RecordedRun, step: int) -> OtherPasses | None:
    """Return the difference between the forward passes of a step, or None if each pass has the same rows.

    A loss that is a mean over rows does not depend on the passes. A router's balance loss does, since it
    multiplies two means over the tokens of one pass.
    """
    for name in _list_inputs(expected, step):
        is_alike = _global_rows(expected, step, name) == _global_rows(actual, step, name)
        wanted, found = _list_passes(expected, step, name), _list_passes(actual, step, name)
        if is_alike and wanted != found:
            sizes = [tuple(sorted(map(len, passes.elements()))) for passes in (wanted, found)]
            return OtherPasses(step=step, expected=sizes[0], actual=sizes[1])
    return None


def _list_unknown(run: RecordedRun) -> set[int]:
    """Return the steps in which `forward` was called directly for the first time."""
    return {note.step for rank in run.ranks for note in rank.notes if note.about == "bypass"}


def _list_passes(run: RecordedRun, step: int, name: str) -> Counter[tuple[int, ...]]:
    """Return the sorted rows of each forward pass with multiplicity; ranks with identical rows count once."""
    distinct = {
        _all_rows(rank, step): [
            tuple(sorted(row.rows)) for row in rank.rows if (row.step, row.name) == (step, name)
        ]
        for rank in run.ranks
    }
    return Counter(rows for passes in distinct.values() for rows in passes)


def _list_inputs(run: RecordedRun, step: int) -> list[str]:
    return list(dict.fromkeys(row.name for rank in run.ranks for row in rank.rows if row.step == step))


def _rows_of(rank: RankRecord, step: int, name: str) -> tuple[int, ...]:
    return tuple(value for row in rank.rows if (row.step, row.name) == (step, name) for value in row.rows)


def _global_rows(run: RecordedRun, step: int, name: str) -> Counter[int]:
    # Identify ranks by all inputs together: the rows of an attention mask are often equal on every rank.
    distinct = {_all_rows(rank, step): _rows_of(rank, step, name) for rank in run.ranks}
    return Counter(value for rows in distinct.values() for value in rows)


def _all_rows(rank: RankRecord, step: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((row.name, row.rows) for row in rank.rows if row.step == step)


def _shape(run: RecordedRun, step: int, name: str) -> set[tuple[int, ...]]:
    return {row.shape[1:] for rank in run.ranks for row in rank.rows if (row.step, row.name) == (step, name)}


def _make_finding(
    run: RecordedRun, step: int, name: str, wanted: Counter[int], found: Counter[int]
) -> Finding:
    by_rank = {rank.rank: _rows_of(rank, step, name) for rank in run.ranks}
    surplus, missing = found - wanted, wanted - found
    others = {value for value in surplus if value not in wanted}
    wrong = others or set(surplus)
    ranks = tuple(rank for rank, rows in by_rank.items() if wrong.intersection(rows))
    seen = {rank.rank: _all_rows(rank, step) for rank in run.ranks}
    repeated = tuple(rank for rank, rows in seen.items() if missing and list(seen.values()).count(rows) > 1)
    facts = BatchFacts(
        num_rows=wanted.total(),
        num_missing=missing.total(),
        num_other=sum(surplus[value] for value in others),
        num_repeated=sum(surplus[value] for value in surplus if value not in others),
        ranks=ranks,
        repeated=repeated,
    )
    worst = (ranks or repeated or tuple(by_rank))[0]
    error = max(missing.total(), surplus.total()) / wanted.total()
    return make_finding(
        ScriptCheck.BATCH, f"input {name}", step, ranks or repeated, facts, error=error, rank=worst
    )
