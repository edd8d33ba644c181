"""Which copies of their tokens ranks get nothing back for: a rule says it of all ranks, or nothing does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeverify.diagnose.routed.lost_copies import find_lost
from moeverify.results.layout import LostCopies

IDS = torch.tensor([[3, 1], [0, 2], [1, 0], [2, 3], [0, 3], [1, 2], [2, 0], [3, 1]])
"""The choices of eight tokens, of which each of two ranks sends four: eight copies."""

CALLS = [(torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 6, 7]))]


def lose(*places: int, by_expert: bool = False) -> Tensor:
    """Return the copies that are lost where those at some places of each rank are."""
    lost = torch.zeros(IDS.shape, dtype=torch.bool)
    for tokens in CALLS[0]:
        copies = (tokens.unsqueeze(1) * 2 + torch.arange(2)).flatten()
        order = IDS.flatten()[copies].argsort(stable=True) if by_expert else torch.arange(8)
        lost.view(-1)[copies[order[list(places)]]] = True
    return lost


@pytest.mark.parametrize("order", ["tokens", "experts"])
@pytest.mark.parametrize(
    ("places", "way", "number"),
    [
        (range(1, 8), "all-but-first", 1),
        (range(5), "all-but-last", 3),
        ([5, 6, 7], "all-but-first", 5),
        ([0, 1, 2], "all-but-last", 5),
    ],
)
def test_one_rule_says_what_is_lost(places: list[int], way: str, number: int, order: str) -> None:
    found = find_lost(CALLS, IDS, lose(*places, by_expert=order == "experts"))
    assert found == LostCopies(way=way, number=number, order=order)  # type: ignore[arg-type]


def test_all_are_lost() -> None:
    assert find_lost(CALLS, IDS, lose(*range(8))) == LostCopies(way="all")


@pytest.mark.parametrize(
    ("kept", "way", "order"),
    [
        pytest.param(torch.ones(8), "all-but-last-of-token", "tokens", id="last choice"),
        pytest.param(torch.zeros(8), "all-but-first-of-token", "tokens", id="first choice"),
        pytest.param(IDS.argmax(dim=1), "all-but-last-of-token", "experts", id="last expert"),
        pytest.param(IDS.argmin(dim=1), "all-but-first-of-token", "experts", id="first expert"),
    ],
)
def test_one_copy_of_each_token_is_left(kept: Tensor, way: str, order: str) -> None:
    lost = torch.arange(2) != kept.unsqueeze(1)
    assert find_lost(CALLS, IDS, lost) == LostCopies(way=way, order=order)  # type: ignore[arg-type]
    lost[3] = False
    assert find_lost(CALLS, IDS, lost) is None


@pytest.mark.parametrize("places", [[1], [2, 5, 6], [0, 2]])
def test_others_have_no_rule(places: list[int]) -> None:
    assert find_lost(CALLS, IDS, lose(*places)) is None


def test_ranks_that_lose_other_numbers_have_no_rule() -> None:
    lost = lose(0, 1)
    lost[4, 1] = False
    assert find_lost(CALLS, IDS, lost) is None
    assert find_lost([], IDS, lose(0)) is None
