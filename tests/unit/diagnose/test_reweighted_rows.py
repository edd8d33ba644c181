"""A mixture of experts of a user's own, which sums right copies of its tokens by other weights than one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, examine

from moeverify.diagnose.first_divergence import find_origins
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.rank_readings import RankReadings
from moeverify.results.cause import Cause
from moeverify.results.operation import Reweighted
from moeverify.train.module_taps import Reading

NUM_TOKENS, NUM_COPIES, WIDTH = 12, 2, 8  # 3 rows of 4 positions
ORDER = torch.randperm(NUM_TOKENS * NUM_COPIES, generator=torch.Generator().manual_seed(3))


def diagnose(
    alter: Callable[[Tensor], Tensor],
    *,
    tokens: Tensor | None = None,
    added: float = 0.0,
    spoil: Callable[[Tensor], Tensor] = lambda output: output,
    width: int = WIDTH,
) -> tuple[Cause | None, Reweighted | None]:
    """Return what is said where one rank sums copies by altered weights (tokens, copies)."""
    tokens = draw(NUM_TOKENS, width) if tokens is None else tokens
    copies = draw(NUM_TOKENS, NUM_COPIES, width, seed=1)
    weights = draw(NUM_TOKENS, NUM_COPIES, seed=2).softmax(dim=1) * draw(NUM_TOKENS, 1, seed=4).sigmoid()

    def mix(by: Tensor) -> Tensor:
        return ((copies * by[..., None]).sum(dim=1) + added * tokens).view(3, 4, width)

    taken = tokens.repeat_interleave(NUM_COPIES, dim=0)[ORDER]
    made = copies.flatten(0, 1)[ORDER]

    def read(output: Tensor) -> list[Reading]:
        return [
            Reading("forward", 0, "moe", "input", 0, tokens.view(3, 4, width)),
            Reading("forward", 1, "moe.experts", "input", 0, taken, is_loose=True),
            Reading("forward", 2, "moe.experts", "output", 0, made, is_loose=True),
            Reading("forward", 3, "moe", "output", 0, output),
        ]

    by_rank = [RankReadings(read(spoil(mix(alter(weights)))), [(range(3), range(4))])]
    search = find_origins(read(mix(weights)), by_rank, {0: {}}, 1, torch.float64)
    inputs = DiagnosisInputs(search=search)
    found = examine("reweighted_rows", search.origins["forward"].tensor, inputs).explanation
    if found is None:
        return None, None
    assert isinstance(found.operation, Reweighted)
    assert (found.subject.module, found.operation.rows) == ("moe", "moe.experts")
    return found.cause, found.operation


def test_rows_that_are_left_out_are_counted() -> None:
    lost = torch.zeros(NUM_TOKENS, NUM_COPIES, dtype=torch.bool)
    lost[2, 0] = lost[5, 1] = lost[9] = True
    cause, operation = diagnose(lambda weights: weights.masked_fill(lost, 0.0))
    assert cause is Cause.FORWARD
    assert operation == Reweighted(rows="moe.experts", way="left-out", num_wrong=4, num_rows=24)


def test_weights_that_are_normalized_are_named_with_what_they_sum_to() -> None:
    _, operation = diagnose(lambda weights: 2.5 * weights / weights.sum(dim=1, keepdim=True))
    assert operation is not None
    assert operation.way == "normalized"
    assert operation.total == pytest.approx(2.5)


def test_weights_of_the_other_copies_are_named() -> None:
    _, operation = diagnose(lambda weights: weights.flip(1))
    assert operation is not None
    assert (operation.way, operation.num_wrong) == ("exchanged", 24)


def test_other_weights_are_said_to_be_others() -> None:
    _, operation = diagnose(lambda weights: weights**2)
    assert operation is not None
    assert operation.way == "other"


def test_equal_totals_alone_are_no_normalization() -> None:
    def level(weights: Tensor) -> Tensor:
        return torch.stack([weights[:, 0], 1.0 - weights[:, 0]], dim=1)

    _, operation = diagnose(level)
    assert operation is not None
    assert operation.way == "other"


def test_an_output_that_is_no_sum_of_the_copies_is_not_explained() -> None:
    assert diagnose(lambda weights: weights, spoil=lambda output: output.flip(1)) == (None, None)
    assert diagnose(lambda weights: 0.5 * weights, added=1.0) == (None, None)  # nor is the golden's one


def test_too_few_numbers_prove_nothing() -> None:
    assert diagnose(lambda weights: weights.flip(1), width=NUM_COPIES + 3) == (None, None)


def test_tokens_with_a_twin_are_left_to_the_others() -> None:
    tokens = draw(NUM_TOKENS, WIDTH)
    tokens[1] = tokens[0]
    _, operation = diagnose(lambda weights: weights.flip(1), tokens=tokens)
    assert operation is not None
    assert operation.num_rows == 20
    assert diagnose(lambda weights: weights.flip(1), tokens=tokens[:1].expand(NUM_TOKENS, WIDTH)) == (
        None,
        None,
    )


def diagnose_backward(alter: Callable[[Tensor], Tensor]) -> tuple[Cause | None, Reweighted | None]:
    """Return what is said where a rank sums the gradients of copies by altered weights, beside what a gate gets."""
    tokens = draw(NUM_TOKENS, WIDTH)
    gradients = draw(NUM_TOKENS, NUM_COPIES, WIDTH, seed=5)
    gradients[3] = 0.0  # padding
    through_gate = draw(NUM_TOKENS, WIDTH, seed=6)
    taken = tokens.repeat_interleave(NUM_COPIES, dim=0)[ORDER]
    made = draw(NUM_TOKENS * NUM_COPIES, WIDTH, seed=1)

    def read(weights: Tensor) -> list[Reading]:
        passed = (through_gate + (gradients * weights[..., None]).sum(dim=1)).view(3, 4, WIDTH)
        output = draw(3, 4, WIDTH, seed=7)
        return [
            Reading("forward", 0, "moe", "input", 0, tokens.view(3, 4, WIDTH)),
            Reading("forward", 1, "moe.experts", "input", 0, taken, is_loose=True),
            Reading("forward", 2, "moe.experts", "output", 0, made, is_loose=True),
            Reading("backward", 0, "moe", "output", 0, output),
            Reading("backward", 1, "moe.experts", "input", 0, gradients.flatten(0, 1)[ORDER], is_loose=True),
            Reading("backward", 2, "moe", "input", 0, passed),
        ]

    ones = torch.ones(NUM_TOKENS, NUM_COPIES, dtype=torch.float64)
    by_rank = [RankReadings(read(alter(ones)), [(range(3), range(4))])]
    search = find_origins(read(ones), by_rank, {0: {}}, 1, torch.float64)
    inputs = DiagnosisInputs(search=search)
    found = examine("reweighted_rows", search.origins["backward"].tensor, inputs).explanation
    assert found is not None
    assert isinstance(found.operation, Reweighted)
    return found.cause, found.operation


def test_gradients_of_rows_that_do_not_come_back_are_counted_without_those_that_are_zero() -> None:
    cause, operation = diagnose_backward(torch.zeros_like)
    assert cause is Cause.BACKWARD
    assert operation == Reweighted(rows="moe.experts", way="left-out", num_wrong=22, num_rows=24)


def test_gradients_of_rows_that_come_back_by_a_factor_are_named_with_it() -> None:
    _, operation = diagnose_backward(lambda weights: 0.25 * weights)
    assert operation is not None
    assert operation.way == "scaled"
    assert operation.total == pytest.approx(0.25)
