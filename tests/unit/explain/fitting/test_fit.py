"""The fit of wrong gradients on the golden's parts, and the hypotheses that differ in these parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wrong_tensors import (
    PARAMETERS,
    Refused,
    combine,
    draw,
    examine,
    find_hypothesis,
    make_components,
    make_golden,
    make_inputs,
    make_tensor,
)

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.fit import fit_columns
from moeverify.report.words.cause import describe_explanation
from moeverify.results.cause import Cause
from moeverify.results.factor import Product, Source
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE, Part, Tokens

FITS = ("one_factor", "loss_terms", "batch_shares", "share_terms")
EP_AND_TP = Axes({}, [Source(name="ep", size=2), Source(name="tp", size=4)])


def fit(name: str, tensors: Any, components: Any, axes: Axes = EP_AND_TP) -> Any:
    """Return the result of one of the fits for some gradients together."""
    return (
        find_hypothesis(name).test(tensors, make_inputs(*tensors, components=components, axes=axes))
        or Refused()
    )


def explain_first(tensors: Any, components: Any, axes: Axes = EP_AND_TP) -> Any:
    """Return the explanation of the first fit that explains, and the names of those before it."""
    refused = []
    for name in FITS:
        outcome = fit(name, tensors, components, axes)
        if outcome.explanation is not None:
            return outcome.explanation, refused
        refused.append(name)
    return None, refused


def wrong_parts(explanation: Any) -> dict[Part, float]:
    assert isinstance(explanation.operation, Scaled)
    return {each.part: each.factor.value for each in explanation.operation.contributions}


@pytest.mark.parametrize(
    ("weight", "product"), [(2.0, Product(times=("ep",))), (0.25, Product(over=("tp",)))]
)
def test_one_factor_is_found_with_its_axis(weight: float, product: Product) -> None:
    components = make_components()
    explanation, refused = explain_first(combine(components, lambda term, cell: weight), components)
    assert (explanation.cause, refused) == (Cause.SCALE, [])
    assert wrong_parts(explanation) == {WHOLE: pytest.approx(weight, abs=1e-12)}
    assert explanation.candidates == (product,)
    assert explanation.subject.tensors == PARAMETERS


@pytest.mark.parametrize(
    ("factors", "ranks", "sentence"),
    [
        ((1.0, 2.0), (1,), "the gradient is 2x too large, on rank 1 alone"),
        ((2.0, 1.0, 1.0, 2.0), (0, 3), "the gradient is 2x too large, on ranks 0, 3 alone"),
        ((2.0, 2.0), (), "the gradient is 2x too large; 2 = tp"),
        ((3.0, 2.0), (), "the gradient is 3x too large"),  # the worst replica is reported; no other is right
    ],
)
def test_a_factor_of_some_replicas_is_told_of_their_ranks_and_of_no_axis(
    factors: tuple[float, ...], ranks: tuple[int, ...], sentence: str
) -> None:
    expected = draw(4, 6)
    wrong = make_tensor(expected, *(factor * expected for factor in factors))
    axes = Axes({}, [Source(name="tp", size=2)])
    explanation = fit("one_factor", [wrong], make_components(), axes).explanation
    assert explanation is not None
    assert isinstance(explanation.operation, Scaled)
    assert explanation.operation.ranks == ranks
    assert describe_explanation(explanation) == sentence


def test_axes_of_one_size_are_candidates_alike() -> None:
    components = make_components()
    axes = Axes({}, [Source(name="ep", size=2), Source(name="cp", size=2)])
    explanation, _ = explain_first(combine(components, lambda term, cell: 2.0), components, axes)
    assert explanation.candidates == (Product(times=("ep",)), Product(times=("cp",)))


def test_an_axis_that_does_not_affect_the_tensors_is_no_candidate() -> None:
    components = make_components()
    sources = [Source(name="ep", size=2), Source(name="cp", size=2)]
    axes = Axes({}, sources, lambda axis, tensor: axis != "ep")
    explanation, _ = explain_first(combine(components, lambda term, cell: 2.0), components, axes)
    assert explanation.candidates == (Product(times=("cp",)),)


@pytest.mark.parametrize(("term", "weight"), [("balance", 0.0), ("balance", 0.5), ("z", 4.0), ("lm", 0.5)])
def test_a_wrong_loss_term_is_found_however_small_it_is(term: str, weight: float) -> None:
    components = make_components()
    tensors = combine(components, lambda t, cell: weight if t == term else 1.0)
    explanation, refused = explain_first(tensors, components)
    assert (explanation.cause, refused) == (Cause.TERM_SCALE, ["one_factor"])
    assert wrong_parts(explanation) == {Part(term=term): pytest.approx(weight, abs=1e-7)}


def combine_narrow(components: Any, weigh: Any) -> Any:
    """Return such gradients rounded to float32."""
    tensors = combine(components, weigh)
    rounded = [tensor.whole.to(torch.float32).to(torch.float64) for tensor in tensors]
    return [
        make_tensor(tensor.expected, total, total, name=tensor.name, precision=torch.float32)
        for tensor, total in zip(tensors, rounded, strict=True)
    ]


@pytest.mark.parametrize(
    ("weight", "product"),
    [(0.0, None), (0.5, Product(over=("ep",))), (4.0, Product(times=("tp",)))],
)
def test_what_float32_leaves_of_a_small_term_is_the_number_that_it_is(
    weight: float, product: Product | None
) -> None:
    components = make_components()
    tensors = combine_narrow(components, lambda term, cell: weight if term == "balance" else 1.0)
    explanation, _ = explain_first(tensors, components)
    # The term itself, and none of the others, whose coefficients are 1 except for rounding too.
    assert wrong_parts(explanation) == {Part(term="balance"): weight}
    assert explanation.candidates == (() if product is None else (product,))


@pytest.mark.parametrize(("weight", "product"), [(0.0, None), (1 / 276, Product(over=("rows",)))])
def test_nothing_is_told_from_one_over_a_large_number_of_the_run(
    weight: float, product: Product | None
) -> None:
    components = make_components()
    axes = Axes(
        {}, EP_AND_TP.sources, loss_counts=[Source(name="rows", size=276), Source(name="x", size=500)]
    )
    tensors = combine_narrow(components, lambda term, cell: weight if term == "balance" else 1.0)
    explanation, _ = explain_first(tensors, components, axes)
    assert wrong_parts(explanation) == {Part(term="balance"): weight}
    assert explanation.candidates == (() if product is None else (product,))


@pytest.mark.parametrize(
    ("precision", "weights", "is_asked"),
    [
        (torch.bfloat16, {"lm": 0.0, "balance": 0.03}, True),
        (torch.float16, {"z": 1.3}, True),
        (torch.bfloat16, {"lm": 0.0, "balance": 0.5}, False),
        (torch.float32, {"lm": 0.0, "balance": 0.03}, False),
        (torch.float64, {"lm": 0.0, "balance": 0.03}, False),
    ],
)
def test_a_number_of_16_bits_that_nothing_of_the_run_equals_is_an_estimate(
    precision: torch.dtype, weights: dict[str, float], is_asked: bool
) -> None:
    components = make_components()
    exact = combine(components, lambda term, cell: weights.get(term, 1.0))
    tensors = [
        make_tensor(each.expected, each.whole, each.whole, name=each.name, precision=precision)
        for each in exact
    ]
    explanation = fit("loss_terms", tensors, components).explanation
    assert set(wrong_parts(explanation)) == {Part(term=term) for term in weights}
    assert explanation.is_estimate is is_asked


@pytest.mark.parametrize("weight", [1e-3, 0.499, 0.5002, 3.999])
def test_a_number_that_the_errors_can_tell_from_another_is_itself(weight: float) -> None:
    components = make_components()
    tensors = combine_narrow(components, lambda term, cell: weight if term == "balance" else 1.0)
    explanation, _ = explain_first(tensors, components)
    assert wrong_parts(explanation)[Part(term="balance")] == pytest.approx(weight, abs=5e-5)
    assert explanation.candidates == ()


@pytest.mark.parametrize("change", [3e-7, 3e-5])
def test_in_float64_a_number_is_never_taken_for_one_beside_it(change: float) -> None:
    components = make_components()
    tensors = combine(components, lambda term, cell: 0.5 + change if term == "balance" else 1.0)
    explanation, _ = explain_first(tensors, components)
    assert wrong_parts(explanation)[Part(term="balance")] == pytest.approx(0.5 + change, abs=1e-9)


def test_a_mean_of_means_is_recognized_in_float32() -> None:
    components = make_components()
    weights = [100 / (4 * count) for count in components.num_valid]
    tensors = combine_narrow(components, lambda term, cell: weights[cell] if term == "balance" else 1.0)
    explanation, _ = explain_first(tensors, components)
    assert explanation.operation.local_means == 4
    assert {part.term for part in wrong_parts(explanation)} == {"balance"}


def test_a_missing_share_is_found_and_no_term() -> None:
    components = make_components()
    tensors = combine(components, lambda term, cell: 0.0 if cell == 2 else 1.0)
    explanation, refused = explain_first(tensors, components)
    assert (explanation.cause, refused) == (Cause.SHARE_WEIGHTS, ["one_factor", "loss_terms"])
    assert wrong_parts(explanation) == {Part(tokens=Tokens(data_rank=2)): pytest.approx(0.0, abs=1e-9)}
    assert explanation.operation.local_means == 0


def test_a_weight_of_a_share_that_equals_an_axis_does_so_by_chance() -> None:
    components = make_components()
    tensors = combine(components, lambda term, cell: 2.0 if cell == 1 else 1.0)
    explanation, _ = explain_first(tensors, components)
    assert (explanation.cause, explanation.candidates) == (Cause.SHARE_WEIGHTS, ())


def test_a_mean_of_means_is_recognized_by_all_of_its_weights() -> None:
    components = make_components()
    weights = [100 / (4 * count) for count in components.num_valid]
    tensors = combine(components, lambda term, cell: weights[cell])
    assert explain_first(tensors, components)[0].operation.local_means == 4
    weights[0] *= 1.1
    tensors = combine(components, lambda term, cell: weights[cell])
    explanation, _ = explain_first(tensors, components)
    assert (explanation.cause, explanation.operation.local_means) == (Cause.SHARE_WEIGHTS, 0)


def test_equal_shares_are_no_mean_of_means() -> None:
    # If all shares have equally many tokens, a mean of means is right: one rank's balance loss is off.
    components = make_components()
    components = type(components)(components.cells, components.parts, (10, 10, 10, 10), components.names)
    tensors = combine(components, lambda term, cell: 2.0 if (term, cell) == ("balance", 1) else 1.0)
    explanation, refused = explain_first(tensors, components)
    assert refused == ["one_factor", "loss_terms", "batch_shares"]
    assert explanation.operation.local_means == 0
    part = Part(term="balance", tokens=Tokens(data_rank=1))
    assert wrong_parts(explanation) == {part: pytest.approx(2.0, abs=1e-7)}


def test_what_is_no_combination_gets_no_cause() -> None:
    components = make_components()
    tensors = [
        make_tensor(
            make_golden(components, name), make_golden(components, name) + 1e-3 * draw(40, seed=9), name=name
        )
        for name in PARAMETERS
    ]
    explanation, refused = explain_first(tensors, components)
    assert explanation is None
    assert refused == list(FITS)


def test_an_error_in_one_of_two_tensors_is_not_explained_by_the_other() -> None:
    components = make_components()
    first, second = combine(components, lambda term, cell: 2.0)
    other = make_tensor(second.expected, second.expected + 1e-9 * draw(40, seed=3), name=second.name)
    assert fit("one_factor", [first, other], components).explanation is None


def test_a_factor_near_one_keeps_its_digits() -> None:
    expected = draw(64)
    outcome = examine("one_factor", make_tensor(expected, (1 + 3e-8) * expected))
    assert wrong_parts(outcome.explanation)[WHOLE] - 1 == pytest.approx(3e-8, rel=1e-6)


def test_without_parts_only_one_factor_is_tested() -> None:
    expected = draw(6, 6)
    tensor = make_tensor(expected, 2 * expected, 2 * expected)
    assert [name for name in FITS if fit(name, [tensor], None).explanation is not None] == ["one_factor"]


def test_too_few_numbers_prove_nothing() -> None:
    expected = draw(6)
    tensor = make_tensor(expected, 2 * expected)
    columns = [(Part(term=str(number)), lambda name, seed=number: draw(6, seed=seed)) for number in range(4)]
    assert fit_columns([tensor], columns) is None
    assert fit_columns([tensor], columns[:3]) is not None


def test_what_is_not_finite_is_not_fitted() -> None:
    expected = draw(8)
    actual = expected.clone()
    actual[3] = float("nan")
    assert examine("one_factor", make_tensor(expected, actual)).explanation is None


def test_parts_that_are_zero_everywhere_get_no_coefficient() -> None:
    expected = draw(20)
    tensor = make_tensor(expected, 3 * expected)
    zero = torch.zeros(20, dtype=torch.float64)
    found = fit_columns(
        [tensor], [(Part(term="lm"), lambda name: expected), (Part(term="z"), lambda name: zero)]
    )
    assert found.parts == (Part(term="lm"),)
    assert found.coefficients == (pytest.approx(3.0),)


def test_coefficients_come_out_to_ten_digits() -> None:
    components = make_components()
    weights = [1.0, 0.75, 0.25, 1.5]
    tensors = combine(components, lambda term, cell: weights[cell])
    (seen,) = fit("batch_shares", tensors, components).observations
    assert [each.factor.value for each in seen.contributions] == pytest.approx(weights, abs=1e-10)
