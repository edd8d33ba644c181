"""Hypotheses about outputs and gradients of modules: cases that each explains, and that it must refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from wrong_tensors import draw, examine, make_origin, make_tensor

from moeverify.explain.fitting.first_divergence import Divergence, Search, StepFindings, find_origins
from moeverify.explain.fitting.rank_readings import RankReadings, locate_tokens
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Altered, Replaced, Scaled, Unreduced
from moeverify.train.module_taps import Reading, Tap


def test_a_module_that_is_right_in_the_first_micro_batch_has_changed_state() -> None:
    expected = draw(2, 3, 4)
    tensor, inputs = make_origin(expected, draw(2, 3, 4, seed=1), first_micro_batch=2)
    explanation = examine("altered", tensor, inputs).explanation
    assert (explanation.cause, explanation.operation) == (Cause.STATE, Altered(first_micro_batch=2))
    tensor, inputs = make_origin(expected, draw(2, 3, 4, seed=1))
    assert examine("altered", tensor, inputs).explanation.cause is Cause.FORWARD


@pytest.mark.parametrize("answer", [True, False, None])
def test_weights_of_the_step_before_are_asked_for(answer: bool | None) -> None:
    tensor, inputs = make_origin(draw(2, 3, 4), draw(2, 3, 4, seed=1))
    asked: list[Divergence] = []

    def is_stale(origin: Divergence) -> bool | None:
        asked.append(origin)
        return answer

    explanation = examine("stale_weights", tensor, replace(inputs, stale=is_stale)).explanation
    assert [origin.tensor for origin in asked] == [tensor]
    assert (explanation is not None) == bool(answer)
    if explanation is not None:
        assert explanation.operation == Replaced(by="weights-of-step-before")
        assert explanation.subject.module == "layers.0.moe"


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


@pytest.mark.parametrize(
    ("num_right", "module", "losses"), [(0, "", ("lm",)), (3, "", ()), (0, "layers.2", ())]
)
def test_a_gradient_that_is_wrong_from_the_first_one_on_comes_from_the_loss(
    num_right: int, module: str, losses: tuple[str, ...]
) -> None:
    tensor, inputs = make_origin(draw(2, 3, 4), draw(2, 3, 4, seed=1), module=module, direction="backward")
    assert inputs.search is not None
    origin = replace(inputs.search.origins["backward"], end="input" if module else "output")
    search = replace(
        inputs.search, origins={"backward": origin}, num_right={"forward": 3, "backward": num_right}
    )
    subject = examine("altered", tensor, replace(inputs, search=search)).explanation.subject
    assert (subject.tensors, subject.module) == (losses, module)


@pytest.mark.parametrize(("direction", "cause"), [("forward", Cause.FORWARD), ("backward", Cause.BACKWARD)])
def test_where_nothing_is_known_the_place_is_all_that_is_said(direction: str, cause: Cause) -> None:
    tensor, inputs = make_origin(draw(2, 3, 4), draw(2, 3, 4, seed=1), direction=direction)
    outcome = examine("altered", tensor, inputs)
    assert outcome.explanation.cause is cause
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


# the first divergence


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


@pytest.mark.parametrize("kept", [True, False])
def test_inputs_match_only_where_they_were_read(kept: bool) -> None:
    # An embedding takes ids, and these are never read.
    golden = [read("norm", 0, draw(1, 3, 4), end="input"), read("norm", 1, draw(1, 3, 4, seed=1))][not kept :]
    readings = [*golden[:-1], read("norm", 1, golden[-1].local * 2)]
    ranks = [RankReadings(readings, [(range(1), range(3))])]
    assert find_origins(golden, ranks, {0: {}}, 1, torch.float64).origins["forward"].inputs_seen is kept


def test_a_wrong_input_was_made_by_the_module_around() -> None:
    golden = [read("layers.0.mlp", 0, draw(1, 3, 4), end="input")]
    readings = [read("layers.0.mlp", 0, draw(1, 3, 4, seed=1), end="input")]
    search = find_origins(golden, [RankReadings(readings, [(range(1), range(3))])], {0: {}}, 1, torch.float64)
    assert search.origins["forward"].culprit == "layers.0"


def test_readings_of_one_place_in_the_order_are_told_apart_by_which_they_are() -> None:
    # Both outputs of a module that returns a tuple differ; the second is searched in all readings.
    golden = [
        Reading("forward", 0, "attention", "output", 0, draw(1, 3, 4, seed=at), str(at)) for at in range(2)
    ]
    readings = [replace(golden[0]), replace(golden[1], local=golden[1].local * 2)]
    ranks = [RankReadings(readings, [(range(1), range(3))])]
    origin = find_origins(golden, ranks, {0: {}}, 1, torch.float64).origins["forward"]
    assert torch.equal(origin.tensor.expected, golden[1].local)


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


@pytest.mark.parametrize(
    "shape", [(), (4,), (1,), (4, 1), (1, 1), (1, 3), (4, 3), (4, 1, 1), (1, 1, 8), (1, 3, 1)]
)
@pytest.mark.parametrize(
    "local_shape", [(), (1,), (3,), (1, 1), (1, 3), (1, 1, 1), (1, 3, 1), (1, 1, 8), (1, 3, 8)]
)
@pytest.mark.parametrize("positions", [range(1, 2), range(3)])
def test_what_is_located_lies_inside_of_the_tensor(
    shape: tuple[int, ...], local_shape: tuple[int, ...], positions: range
) -> None:
    # The last of four rows; an out-of-range row would end the diagnosis.
    expected, local = torch.zeros(shape), torch.zeros(local_shape)
    region = locate_tokens(expected, local, range(3, 4), positions, (1, 2))
    if region is not None:
        assert region.take(expected).shape == local.shape


def test_a_difference_below_the_noise_of_the_model_began_nothing() -> None:
    # A factor rounded to float32 in one of the two, beside a real error in the second layer.
    golden = [read("embed", 0, draw(1, 3, 4)), read("layers.0", 1, draw(1, 3, 4, seed=1))]
    readings = [read("embed", 0, golden[0].local * (1 + 2e-8)), read("layers.0", 1, golden[1].local * 1.5)]
    ranks = [RankReadings(readings, [(range(1), range(3))])]
    found = {
        noise: find_origins(golden, ranks, {0: {}}, 1, torch.float64, StepFindings(noise=noise))
        .origins["forward"]
        .module
        for noise in (0.0, 1e-6)
    }
    assert found == {0.0: "embed", 1e-6: "layers.0"}


WHOLE = [(range(2), range(3))]


def search_one_rank(
    golden: list[Reading], actual: list[Reading], known: StepFindings | None = None
) -> Search:
    return find_origins(golden, [RankReadings(actual, WHOLE)], {0: {}}, 1, torch.float64, known)


def test_an_argument_that_has_one_row_for_all_is_compared_too() -> None:
    # Otherwise "inputs match" would blame the block for the tables that it received.
    tables, hidden = draw(1, 3, 4), draw(2, 3, 4, seed=1)
    golden = [read("rotary", 0, tables), read("block", 1, hidden)]
    search = search_one_rank(golden, [read("rotary", 0, 2 * tables), read("block", 1, hidden + 1)])
    assert search.origins["forward"].module == "rotary"


def test_what_a_module_around_makes_good_began_nothing() -> None:
    # Weights of experts that ranks shard, whose outputs are summed: the forward pass is right.
    golden = [
        read("mlp.gate", 0, draw(2, 3, 4)),
        read("mlp", 1, draw(2, 3, 4, seed=1)),
        read("head", 2, draw(2, 3, 4, seed=2)),
    ]
    divided = replace(golden[0], local=golden[0].local.tril())
    wrong = replace(golden[2], local=golden[2].local + 1)
    assert search_one_rank(golden, [divided, *golden[1:]]).origins == {}
    assert search_one_rank(golden, [divided, golden[1], wrong]).origins["forward"].module == "head"
    # A loss that differs has an origin: here nothing else is known.
    known = StepFindings(loss_differs=True)
    assert search_one_rank(golden, [divided, *golden[1:]], known).origins["forward"].module == "mlp.gate"


@pytest.mark.parametrize(("left", "module"), [(0.004, "mlp"), (0.4, "mlp.down")])
def test_a_rounded_sum_is_the_origin_and_not_its_parts(left: float, module: str) -> None:
    # The output of a row-parallel layer is a part of the sum that the module around it hands on.
    value, after = draw(2, 3, 4), draw(2, 3, 4, seed=1)
    golden = [read("mlp.down", 0, value), read("mlp", 1, value), read("head", 2, after)]
    actual = [
        read("mlp.down", 0, 0.5 * value),
        read("mlp", 1, (1 + left) * value),
        read("head", 2, after + left),
    ]
    assert search_one_rank(golden, actual).origins["forward"].module == module


def test_a_gradient_that_is_made_good_began_nothing_unless_a_parameter_there_is_wrong() -> None:
    golden = [
        Reading("backward", 0, "mlp.gate", "output", 0, draw(2, 3, 4)),
        Reading("backward", 1, "mlp", "input", 0, draw(2, 3, 4, seed=1)),
    ]
    actual = [replace(golden[0], local=golden[0].local.tril()), golden[1]]
    assert search_one_rank(golden, actual).origins == {}
    other = StepFindings(gradients=["mlp2.gate.weight"])
    assert search_one_rank(golden, actual, other).origins == {}
    inside = StepFindings(gradients=["mlp.gate.weight"])
    assert search_one_rank(golden, actual, inside).origins["backward"].culprit == "mlp"


def test_of_modules_that_hand_on_a_tensor_the_one_that_ranks_read_first_is_named() -> None:
    value = draw(2, 3, 4)
    golden = [
        Reading("backward", 0, "mlp.gate", "output", 0, value),
        Reading("backward", 1, "mlp.experts", "input", 0, value),
    ]
    actual = [
        Reading("backward", 0, "mlp.experts", "input", 0, 2 * value),
        Reading("backward", 1, "mlp.gate", "output", 0, 3 * value),
    ]
    origin = search_one_rank(golden, actual).origins["backward"]
    assert (origin.module, origin.culprit) == ("mlp.experts", "mlp.experts")


def test_backward_the_module_that_made_a_gradient_is_named_where_ranks_have_the_same_at_both() -> None:
    value = draw(2, 3, 4)
    golden = [
        Reading("backward", 0, "attention.q_norm", "output", 0, draw(2, 3, 4, seed=1)),
        Reading("backward", 1, "attention.q_proj", "output", 0, value),
        Reading("backward", 2, "attention.q_norm", "input", 0, value),
    ]
    wrong = [golden[0], *(replace(each, local=2 * value) for each in golden[1:])]
    assert search_one_rank(golden, wrong).origins["backward"].culprit == "attention.q_norm"
    # With a collective between the two, the collective may be wrong.
    wrong[2] = replace(golden[2], local=3 * value)
    assert search_one_rank(golden, wrong).origins["backward"].module == "attention.q_proj"


def test_tokens_in_an_order_of_their_own_are_no_error() -> None:
    # A module that sorts flat tokens by expert: the ranks of a layout each sort their own.
    tokens, after = draw(2, 3, 4), draw(2, 3, 4, seed=1)
    golden = [replace(read("experts", 0, tokens), is_flat=True), read("head", 1, after)]
    moved = tokens.reshape(6, 4)[[3, 1, 5, 0, 2, 4]].reshape(2, 3, 4)
    wrong = read("head", 1, after + 1)
    assert (
        search_one_rank(golden, [replace(golden[0], local=moved), wrong]).origins["forward"].module == "head"
    )
    other = replace(golden[0], local=moved + 1)
    assert search_one_rank(golden, [other, wrong]).origins["forward"].module == "experts"


class Pair(nn.Module):
    """A module that returns flat tokens and a pair, and takes one of its arguments by name."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return x.flatten(0, 1), [x * scale, x.sum()]


def test_every_tensor_at_the_ends_of_a_module_is_read_along_the_tokens() -> None:
    model, x = Pair(), draw(2, 3, 4).requires_grad_()
    tap = Tap(model, 2, 3, scale=2.0, limit=1 << 20)
    with tap.reading():
        flat, (scaled, total) = model(x, scale=draw(2, 3, 4, seed=1))
        (flat.sum() + scaled.sum() + total).backward()
    seen = {(each.direction, each.end, each.slot): each for each in tap.readings}
    assert {key for key in seen if key[0] == "forward"} == {
        ("forward", "input", "0"),
        ("forward", "input", "scale"),
        ("forward", "output", "0"),
        ("forward", "output", "1.0"),
    }
    assert seen["forward", "output", "0"].is_flat
    assert torch.equal(seen["forward", "output", "0"].local, x)
    assert torch.equal(seen["backward", "output", "1.0"].local, torch.full((2, 3, 4), 0.5, dtype=x.dtype))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_module_that_puts_out_no_numbers_is_said_to(value: float) -> None:
    actual = draw(2, 3, 4, seed=1)
    tensor, inputs = make_origin(draw(2, 3, 4), actual)
    assert not examine("altered", tensor, inputs).explanation.operation.is_no_number
    actual[0, 1, 2] = value
    tensor, inputs = make_origin(draw(2, 3, 4), actual)
    assert examine("altered", tensor, inputs).explanation.operation.is_no_number


def test_the_scale_of_a_users_backward_passes_is_no_divergence() -> None:
    # The step adds the gradients of two ranks, and the tap divides by the number of ranks.
    backward = {"direction": "backward", "end": "output"}
    golden = [
        replace(read(name, at, draw(2, 3, 4, seed=at)), **backward)
        for at, name in enumerate(("head", "body"))
    ]
    half = [replace(each, local=each.local / 2) for each in golden]
    wrong = [half[0], replace(half[1], local=half[1].local.flip(1))]
    of_layout, of_user = (
        search_one_rank(golden, wrong, StepFindings(gradients={"body.weight"}, has_own_step=has_own_step))
        for has_own_step in (False, True)
    )
    assert of_layout.origins["backward"].module == "head"
    assert of_user.origins["backward"].module == "body"
    assert of_user.num_right["backward"] == 1
