"""The gradient of a parameter where each call of its module counts other tokens than it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from replays import EXPERTS, name_changes, read_right
from torch import Tensor, nn
from wrong_tensors import draw, make_tensor

from moeverify.diagnose.rank_readings import RankReadings
from moeverify.diagnose.replay.calls import (
    MICRO_BATCHES,
    ModuleCall,
    ModuleCalls,
    find_partner,
    list_expert_calls,
)
from moeverify.diagnose.replay.counted_tokens import COPIES, CountedTokens, join_numbers
from moeverify.diagnose.replay.language import Found, find_variant
from moeverify.diagnose.replay.parameters import (
    EmbeddingGradientFormula,
    ModuleParameterFormula,
    as_module_tensor,
)
from moeverify.diagnose.replay.tokenwise import LinearFormula
from moeverify.layout.region import Indices
from moeverify.report.words.variant import describe_variant
from moeverify.results.change import Change

B, S, H, F = 8, 6, 5, 4
X, GIVEN = draw(B, S, H, seed=1), draw(B, S, F, seed=2)
# Two ranks with two micro-batches of two rows each.
SHARES = [
    [(range(2), range(S)), (range(2, 4), range(S))],
    [(range(4, 6), range(S)), (range(6, 8), range(S))],
]
Keep = Callable[[Tensor, int], Tensor]


def find_calls(shares: Sequence[Sequence[tuple[Indices, Indices]]] = SHARES) -> list[ModuleCall]:
    return ModuleCalls([RankReadings((), each) for each in shares]).find("embed", (B, S))


def sum_calls(keep: Callable[[ModuleCall, Tensor], Tensor], x: Tensor = X) -> Tensor:
    """Return the sum over the calls of what each makes of its tokens, as often as these count."""
    total = torch.zeros(F, H, dtype=torch.float64)
    for call in find_calls():
        counts = keep(call, torch.arange(call.at.numel())).double()
        total += torch.einsum(
            "n,nf,nh->fh", counts, *(each.flatten(0, 1)[call.at.flatten()] for each in (GIVEN, x))
        )
    return total


def explain(actual: Tensor) -> Found | None:
    layer = nn.Linear(H, F, bias=False).double()
    calls = CountedTokens(find_calls(), (B, S))
    formula = ModuleParameterFormula(LinearFormula(layer, X, {}, {}), "weight", GIVEN, calls)
    right = torch.einsum("bsf,bsh->fh", GIVEN, X)
    return find_variant(formula, as_module_tensor(make_tensor(right, actual)), 1e-10)


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda call, n: n < 7, "without the last 5 tokens of each call"),
        (lambda call, n: n >= 10, "without the first 10 tokens of each call"),
        (lambda call, n: 1 + 4 * (n == 11), "with the last token of each call 5 times"),
        (lambda call, n: n % 6 != 4, "without the tokens at position 4 of each call"),
        (lambda call, n: n % 3 != 2, "without one token in 3 of each call"),
        (
            lambda call, n: (n < 9) | (call.ranks != (1,)),
            "without the last 3 tokens of each call, and on rank 1 alone",
        ),
        (
            lambda call, n: (n % 6 != 0) | (call.micro_batch != 1),
            "without the tokens at position 0 of each call, and in micro-batch 1 alone",
        ),
    ],
)
def test_tokens_that_each_call_leaves_out_or_counts_otherwise_are_named(
    keep: Callable[[ModuleCall, Tensor], Tensor], words: str
) -> None:
    found = explain(sum_calls(keep))
    assert found is not None
    told = [describe_variant("parameter:weight", changes) for changes in found.variants]
    assert told[:1] == [f"makes the gradient of its weight {words}"]


def test_tokens_that_are_drawn_by_lot_have_no_such_cause() -> None:
    generator = torch.Generator().manual_seed(7)
    found = explain(sum_calls(lambda call, n: torch.rand(len(n), generator=generator) < 0.7))
    assert name_changes(found) == []


def test_the_input_of_another_micro_batch_is_named() -> None:
    stale = X.clone()
    for rank in (0, 4):
        stale[rank + 2 : rank + 4] = X[rank : rank + 2]
    found = explain(sum_calls(lambda call, n: torch.ones(len(n)), stale))
    # Of two micro-batches the first one is the one before, too.
    assert name_changes(found) == [[("input", "of-micro-batch-before")]]


def test_equal_tokens_are_those_of_one_call() -> None:
    tokens = torch.randint(0, 9, (B, S), generator=torch.Generator().manual_seed(3))
    right = torch.zeros(9, F, dtype=torch.float64).index_add(0, tokens.flatten(), GIVEN.flatten(0, 1))
    actual = torch.zeros_like(right)
    for call in find_calls():
        own = torch.zeros_like(right)
        for at in call.at.flatten().tolist():
            own[tokens.flatten()[at]] = GIVEN.flatten(0, 1)[at]
        actual += own
    formula = EmbeddingGradientFormula(nn.Embedding(9, F), tokens, GIVEN, CountedTokens(find_calls(), (B, S)))
    found = find_variant(formula, as_module_tensor(make_tensor(right, actual)), 1e-10)
    assert name_changes(found) == [[("occurrences", "last-alone")]]


def test_calls_are_those_that_ranks_have_read_and_of_tp_once() -> None:
    readings = [each for each in read_right("stress") if each.module == "layers.0.attention.o_proj"]
    shares = [(range(2), range(8))]
    calls = ModuleCalls([RankReadings(readings, shares)] * 2, {0: {"tp": 0}, 1: {"tp": 1}}, 2, readings)
    (call,) = calls.find("layers.0.attention.o_proj", (2, 8))
    assert (call.ranks, call.at.shape) == ((0, 1), (2, 8))
    # Ranks that do not have every token once say nothing of calls.
    (call,) = ModuleCalls([RankReadings((), shares)], {0: {}}, 1, readings).find("embed", (4, 8))
    assert call.at.shape == (4, 8)


def test_whole_blocks_of_rows_of_each_expert_are_told_from_a_number_of_rows() -> None:
    ids = torch.randint(0, 3, (2, 8, 2), generator=torch.Generator().manual_seed(1))
    calls = list_expert_calls(EXPERTS.calls, ids, 3)
    assert torch.equal(
        torch.cat([call.at.flatten() for call in calls]).sort().values, torch.arange(ids.numel())
    )
    counted = CountedTokens(calls, ids.shape, part=COPIES)
    assert len({call.at.numel() for call in calls}) > 1
    counts = counted.count({COPIES: Change(part=COPIES, way="whole-tiles", number=4)}).flatten()
    for call in calls:
        size = call.at.numel() // 4 * 4
        assert counts[call.at.flatten()].tolist() == [1.0] * size + [0.0] * (call.at.numel() - size)


def test_numbers_of_tokens_that_give_the_same_are_said_in_one() -> None:
    def change(way: str, number: int) -> tuple[Change, ...]:
        return (Change(part="tokens", way=way, number=number),)

    joined = join_numbers([change("without-row", 0), change("without-first", 7), change("without-first", 5)])
    told = [describe_variant("parameter:weight", changes) for changes in joined]
    assert told == [
        "makes the gradient of its weight without the tokens of row 0 of each call",
        "makes the gradient of its weight without the first 5 to 7 tokens of each call",
    ]


def test_each_way_of_a_parameter_has_words() -> None:
    calls = [*find_calls(SHARES[:1]), *find_calls([[(range(4, 8), range(S))]])]
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[0, 0] = False
    tokens = torch.zeros(B, S, dtype=torch.int64)
    formulas = [
        EmbeddingGradientFormula(nn.Embedding(9, F), tokens, GIVEN, CountedTokens(each, (B, S), valid, part))
        for each in (calls, find_calls())
        for part in ("tokens", COPIES)
    ]
    texts = [
        describe_variant("parameter:weight", [change])
        for formula in formulas
        for change in (*formula.ways, *formula.places)
    ]
    assert all(text.removeprefix("makes the gradient of its weight ") for text in texts)


def test_another_micro_batch_is_one_of_the_same_ranks() -> None:
    calls = find_calls([[(range(2 * n, 2 * n + 2), range(S)) for n in range(4)]])
    partners = {
        way: [found.micro_batch for call in calls if (found := find_partner(calls, call, way)) is not None]
        for way in MICRO_BATCHES
    }
    assert partners == {
        "of-micro-batch-before": [0, 0, 1, 2],
        "of-micro-batch-after": [1, 2, 3, 3],
        "of-micro-batch-before-around": [3, 0, 1, 2],
        "of-micro-batch-after-around": [1, 2, 3, 0],
        "of-first-micro-batch": [0, 0, 0, 0],
        "of-last-micro-batch": [3, 3, 3, 3],
    }
