"""Hypotheses about what a module puts out or passes back: what each explains, and what it must refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from wrong_tensors import draw, examine, make_origin, make_tensor

from moeverify.diagnose.first_divergence import Origin, RankReadings, find_origins
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Altered, Moved, Replaced, Scaled, Unreduced
from moeverify.results.trial import Reason
from moeverify.train.module_taps import Reading


def test_a_module_that_is_right_in_the_first_micro_batch_has_changed_state() -> None:
    expected = draw(2, 3, 4)
    tensor, inputs = make_origin(expected, draw(2, 3, 4, seed=1), first_micro_batch=2)
    explanation = examine("later_micro_batch", tensor, inputs).explanation
    assert (explanation.cause, explanation.operation) == (Cause.STATE, Altered(first_micro_batch=2))
    tensor, inputs = make_origin(expected, draw(2, 3, 4, seed=1))
    assert examine("later_micro_batch", tensor, inputs).explanation is None


@pytest.mark.parametrize(("answer", "verdict"), [(True, "yes"), (False, "no"), (None, "untried")])
def test_weights_of_the_step_before_are_asked_for(answer: bool | None, verdict: str) -> None:
    tensor, inputs = make_origin(draw(2, 3, 4), draw(2, 3, 4, seed=1))
    asked: list[Origin] = []

    def is_stale(origin: Origin) -> bool | None:
        asked.append(origin)
        return answer

    outcome = examine("stale_weights", tensor, replace(inputs, stale=is_stale))
    assert [origin.tensor for origin in asked] == [tensor]
    assert outcome.trials[0].verdict == verdict
    assert (outcome.explanation is not None) == (verdict == "yes")
    if outcome.explanation is not None:
        assert outcome.explanation.operation == Replaced(by="weights-of-step-before")
        assert outcome.explanation.subject.module == "layers.0.moe"


def test_partial_sums_of_an_output_are_a_missing_reduction_of_the_module() -> None:
    expected, part = draw(2, 3, 4), draw(2, 3, 4, seed=1)
    tensor, inputs = make_origin(expected, part, expected - part, direction="backward")
    explanation = examine("replica_sum", tensor, inputs).explanation
    assert explanation.cause is Cause.MISSING_REDUCTION
    assert isinstance(explanation.operation, Unreduced)
    assert explanation.subject.quantity is Quantity.MODULE_GRADIENT
    assert (explanation.subject.module, explanation.subject.tensors) == ("layers.0.moe", ())


def test_a_factor_of_an_output() -> None:
    expected = draw(2, 3, 4)
    tensor, inputs = make_origin(expected, 2 * expected, 2 * expected)
    explanation = examine("one_factor", tensor, inputs).explanation
    assert explanation.cause is Cause.SCALE
    assert isinstance(explanation.operation, Scaled)


def test_tokens_with_the_values_of_others_have_moved() -> None:
    expected = draw(2, 3, 4)
    actual = expected.reshape(6, 4)[[0, 4, 2, 3, 1, 5]].reshape(2, 3, 4)
    tensor, inputs = make_origin(expected, actual)
    explanation = examine("moved_tokens", tensor, inputs).explanation
    assert explanation.cause is Cause.PERMUTATION
    assert explanation.operation == Moved(unit="token", moves=((1, 4), (4, 1)), num_moves=2)


@pytest.mark.parametrize("actual", [2 * draw(2, 3, 4), draw(2, 3, 4, seed=1), draw(2, 3, 4)])
def test_tokens_that_are_wrong_or_all_right_have_not_moved(actual: torch.Tensor) -> None:
    tensor, inputs = make_origin(draw(2, 3, 4), actual)
    assert examine("moved_tokens", tensor, inputs).explanation is None


def test_a_tensor_without_tokens_is_not_compared() -> None:
    tensor, inputs = make_origin(draw(4, 4), draw(4, 4, seed=1))
    assert examine("moved_tokens", tensor, inputs).trials[0].reason is Reason.NOT_COMPARABLE


@pytest.mark.parametrize(("direction", "cause"), [("forward", Cause.FORWARD), ("backward", Cause.BACKWARD)])
def test_where_nothing_is_known_the_place_is_all_that_is_said(direction: str, cause: Cause) -> None:
    tensor, inputs = make_origin(draw(2, 3, 4), draw(2, 3, 4, seed=1), direction=direction)
    outcome = examine("altered", tensor, inputs)
    assert (outcome.explanation.cause, outcome.trials) == (cause, ())
    assert outcome.explanation.subject.module == "layers.0.moe"


def test_a_router_whose_choice_is_wrong_too_is_routing() -> None:
    tensor, inputs = make_origin(draw(2, 3, 4), draw(2, 3, 4, seed=1), module="layers.0.moe.router")
    ids = make_tensor(draw(2, 3), draw(2, 3, seed=1), name="layers.0.moe.router", kind="router_ids")
    assert (
        examine("altered", tensor, replace(inputs, tensors={ids.key: ids})).explanation.cause is Cause.ROUTING
    )
    other = make_tensor(draw(2, 3), draw(2, 3, seed=1), name="layers.1.moe.router", kind="router_ids")
    explanation = examine("altered", tensor, replace(inputs, tensors={other.key: other})).explanation
    assert explanation.cause is Cause.FORWARD


# where it began


def read(
    module: str, order: int, local: torch.Tensor, *, micro_batch: int = 0, end: str = "output"
) -> Reading:
    return Reading("forward", order, module, end, micro_batch, local)


def test_a_rank_that_is_wrong_in_its_first_micro_batch_alone_is_found() -> None:
    # The right second micro-batch of the same rank must not hide the wrong first one.
    golden = [read("embed", 0, draw(2, 3, 4)), read("layers.0", 1, draw(2, 3, 4, seed=1))]
    shares = [(range(1), range(3)), (range(1, 2), range(3))]
    off = golden[1].local[:1] + 1.0
    readings = [
        read("embed", 0, golden[0].local[:1]),
        read("embed", 1, golden[0].local[1:], micro_batch=1),
        read("layers.0", 2, off),
        read("layers.0", 3, golden[1].local[1:], micro_batch=1),
    ]
    search = find_origins(golden, [RankReadings(readings, shares)], {0: {}}, 1, torch.float64)
    origin = search.origins["forward"]
    assert (origin.module, origin.culprit, origin.first_micro_batch) == ("layers.0", "layers.0", 0)
    assert search.num_right["forward"] == 1


def test_a_wrong_input_was_made_by_the_module_around() -> None:
    golden = [read("layers.0.mlp", 0, draw(1, 3, 4), end="input")]
    readings = [read("layers.0.mlp", 0, draw(1, 3, 4, seed=1), end="input")]
    search = find_origins(golden, [RankReadings(readings, [(range(1), range(3))])], {0: {}}, 1, torch.float64)
    assert search.origins["forward"].culprit == "layers.0"


def test_what_does_not_run_along_the_rows_is_no_reading_of_a_micro_batch_of_one_row() -> None:
    # Rotary embeddings (1, S, D) on two ranks that see one row in each of two micro-batches.
    rotary, hidden = draw(1, 3, 4), draw(4, 3, 4, seed=1)
    golden = [
        Reading("forward", 0, "rotary", "output", 0, rotary),
        Reading("forward", 1, "norm", "output", 0, hidden),
    ]
    by_rank = []
    for first in (0, 2):
        rows = [range(first, first + 1), range(first + 1, first + 2)]
        readings = [Reading("forward", 2 * at, "rotary", "output", at, rotary) for at in range(2)]
        readings += [
            Reading("forward", 2 * at + 1, "norm", "output", at, 2 * hidden[rows[at]]) for at in range(2)
        ]
        by_rank.append(RankReadings(readings, [(own, range(3)) for own in rows]))
    search = find_origins(golden, by_rank, {0: {}, 1: {}}, 1, torch.float64)
    assert search.origins["forward"].module == "norm"
    assert search.origins["forward"].ranks == (0, 1)
