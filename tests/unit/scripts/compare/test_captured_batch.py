"""The global batch of two recorded runs: ranks that share work count once, equal rows count separately."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moeverify.scripts.compare.batch import find_other_passes, find_other_rows
from moeverify.scripts.record.lines import Rows

TOKENS, MASK = (11, 12, 13, 14), (7, 7, 7, 7)


def make_run(*ranks: tuple[int, ...]) -> Any:
    """Return a run whose ranks saw these places of the batch in one pass, with a mask of equal rows."""
    return make_passes(*((places,) for places in ranks))


def make_passes(*ranks: tuple[tuple[int, ...], ...]) -> Any:
    """Return a run whose ranks saw these places of the global batch in each of their forward passes."""
    return SimpleNamespace(
        ranks=[
            SimpleNamespace(
                rank=number,
                notes=[],
                rows=[
                    Rows(step=0, name=name, shape=(len(places), 8), rows=tuple(values[n] for n in places))
                    for places in passes
                    for name, values in (("input_ids", TOKENS), ("attention_mask", MASK))
                ],
            )
            for number, passes in enumerate(ranks)
        ]
    )


def test_rows_that_are_alike_are_no_repeated_work() -> None:
    assert not list(find_other_rows(make_run((0, 1, 2, 3)), make_run((0, 1), (2, 3)), [0]))


def test_ranks_with_the_same_rows_of_all_inputs_count_once() -> None:
    whole = make_run((0, 1, 2, 3))
    assert not list(find_other_rows(whole, make_run((0, 1, 2, 3), (0, 1, 2, 3)), [0]))
    found = list(find_other_rows(whole, make_run((0, 1), (0, 1)), [0]))
    assert [finding.tensor for finding in found] == ["input input_ids", "input attention_mask"]
    assert found[0].facts is not None
    assert found[0].ranks == (0, 1)


def test_the_same_rows_in_other_passes_are_told_from_the_same_passes() -> None:
    whole, halves = make_run((0, 1, 2, 3)), make_passes(((0, 1), (2, 3)))
    found = find_other_passes(whole, halves, 0)
    assert found is not None
    assert (found.expected, found.actual) == ((4,), (2, 2))
    # Equally many rows per pass, grouped differently: a mean over the tokens of a pass differs.
    strided = find_other_passes(halves, make_run((0, 2), (1, 3)), 0)
    assert strided is not None
    assert (strided.expected, strided.actual) == ((2, 2), (2, 2))


def test_passes_are_alike_on_ranks_that_split_them_or_share_them() -> None:
    halves = make_passes(((0, 1), (2, 3)))
    assert find_other_passes(halves, make_run((1, 0), (2, 3)), 0) is None
    assert find_other_passes(halves, make_passes(((0, 1), (2, 3)), ((0, 1), (2, 3))), 0) is None
    # Different rows are a different finding.
    assert find_other_passes(halves, make_run((0, 1), (0, 1)), 0) is None
