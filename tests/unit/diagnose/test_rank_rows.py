"""By which counts the experts of two ranks took rows, and how far these stand from their places."""

from __future__ import annotations

import torch
from torch import Tensor

from moeverify.diagnose.routed.rank_rows import RankRows, find_counts, find_row_offset, list_rank_rows
from moeverify.diagnose.routed.returned_rows import LOST, ReturnedRows

COUNTS = {(0, 0): [5, 2, 4], (0, 1): [3, 6, 1], (1, 0): [4, 3, 4], (1, 1): [1, 2, 7]}  # (call, rank)


def make_rows(call: int, rank: int, taken: list[int] | None = None, shift: int = 0) -> RankRows:
    """Return rows that experts take by some counts, of tokens that stand `shift` places before."""
    right = torch.arange(3).repeat_interleave(torch.tensor(COUNTS[call, rank]))
    own = torch.arange(len(right))
    experts = right
    if taken is not None:
        given = torch.arange(3).repeat_interleave(torch.tensor(taken))[: len(right)]
        experts = torch.cat([given, torch.full((len(right) - len(given),), LOST)])
    tokens = torch.where(experts == LOST, LOST, own.roll(shift))
    return RankRows(call, rank, right, experts, own, tokens, 3)


def test_counts_of_other_experts_are_named_by_their_order() -> None:
    rows = [make_rows(0, 0, [2, 5, 4]), make_rows(0, 1, [6, 3, 1])]
    found = find_counts(rows)
    assert found is not None
    assert (found.order, found.micro_batch) == ((1, 0, 2), None)
    assert (found.rank, found.expert, found.end, found.right_end) == (0, 0, 2, 5)


def test_counts_of_another_micro_batch_are_named() -> None:
    # Rank 1 has fewer rows in the second micro-batch than in the first, so that the last count is cut.
    rows = [make_rows(0, 0), make_rows(0, 1), make_rows(1, 0, [5, 2, 4]), make_rows(1, 1, [3, 6, 1])]
    found = find_counts(rows)
    assert found is not None
    assert (found.order, found.micro_batch) == ((), 0)


def test_rows_that_no_expert_takes_are_the_last_ones() -> None:
    found = find_counts([make_rows(0, 0, [5, 1, 3]), make_rows(0, 1)])
    assert found is not None
    assert (found.expert, found.end, found.right_end) == (1, 6, 7)


def test_rows_of_other_tokens_are_no_matter_of_counts() -> None:
    rows = [make_rows(0, 0, shift=2), make_rows(0, 1, shift=2)]
    assert find_counts(rows) is None
    assert find_row_offset(rows) == 2
    assert find_row_offset([make_rows(0, 0, shift=2), make_rows(0, 1, shift=1)]) is None
    assert find_counts([make_rows(0, 0)]) is None
    assert find_row_offset([make_rows(0, 0)]) is None


def test_rows_stand_by_expert_and_then_by_the_rank_that_sent_them() -> None:
    ids = torch.tensor([[0, 3], [2, 1], [1, 0], [3, 2]])  # two ranks with two experts each, and two tokens

    def unchanged() -> ReturnedRows:
        tokens: Tensor = torch.arange(4).unsqueeze(1).expand_as(ids)
        return ReturnedRows(tokens, ids)

    rows = list(list_rank_rows([(torch.tensor([0, 1]), torch.tensor([2, 3]))], ids, 4, unchanged()))
    assert [each.own.tolist() for each in rows] == [[0, 2, 1, 2], [1, 3, 0, 3]]
    assert [each.right.tolist() for each in rows] == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert not any(each.is_wrong for each in rows)
