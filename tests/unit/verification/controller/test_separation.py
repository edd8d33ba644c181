"""Choice of the layout that tells axes apart, and the effect of its result on a finding."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.cases.axes.groups import axis_affects, list_degrees, list_groups, list_unions, name_ranks
from moeverify.cases.validation.rules import validate
from moeverify.faults.setting import make_case
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.finding import Finding
from moeverify.results.operation import Scaled, Unreduced
from moeverify.results.part import WHOLE, Contribution, Part
from moeverify.results.place import Place
from moeverify.results.run import CaseResult
from moeverify.verification.controller.follow_up import find_left, merge
from moeverify.verification.controller.separation import change_layout, count_apart, separate, suggest_layout

DDP = {"dp_replicate": 2, "data_parallel": "ddp", "ep": 2}
EP, REPLICATE = Product(times=("ep",)), Product(times=("dp_replicate",))


def times(*names: str) -> tuple[Product, ...]:
    return tuple(Product(times=(name,)) for name in names)


def make_finding(value: float, *equals: Product, cause: Cause = Cause.SCALE, **fields: Any) -> Finding:
    contribution = Contribution(part=WHOLE, factor=Factor(value=value, equals=equals))
    explanation = Explanation(
        cause=cause,
        subject=Subject(quantity=Quantity.GRADIENT, tensors=("layers.1.moe.experts.up",)),
        operation=Scaled(contributions=(contribution,)),
    )
    axes = tuple(source for product in equals for source in product.sources)
    content = {
        "check": "gradient",
        "tensor": "layers.1.moe.experts.up",
        "step": 0,
        "rank": 0,
        "error": 1.0,
        "bound": 1e-10,
        "code": cause.value,
        "explanation": explanation,
        "place": Place(axes=axes),
    }
    return Finding.model_validate(content | fields)


@pytest.mark.parametrize(
    ("layout", "candidates", "by_ranks"),
    [
        (DDP, times("ep", "dp_replicate"), False),
        (DDP, times("dp_replicate", "ep"), True),
        ({"dp_shard": 4, "ep": 2}, times("efsdp", "ep"), False),
        ({"dp_shard": 4, "ep": 2}, (Product(over=("efsdp",)), Product(over=("ep",))), False),
        ({"dp_shard": 2, "tp": 2}, times("dp_shard", "tp"), False),
        ({"dp_shard": 2, "micro_batches": 2}, times("dp_shard", "micro-batches"), False),
        (
            {"dp_shard": 4, "ep": 2},
            (Product(times=("dp_shard",), over=("efsdp",)), Product(times=("dp_shard",), over=("ep",))),
            False,
        ),
    ],
)
def test_a_separating_layout_is_valid_and_has_every_axis(
    layout: dict[str, Any], candidates: tuple[Product, ...], by_ranks: bool
) -> None:
    case = make_case("a", **layout)
    changed = separate(case, candidates, 8, by_ranks=by_ranks)
    other = change_layout(case, changed)
    assert changed
    assert validate(other) == []
    assert other.layout.world_size <= 8
    assert count_apart(case, candidates, by_ranks=by_ranks) == 1
    assert count_apart(other, candidates, by_ranks=by_ranks) == len(candidates)


def test_no_layout_is_proposed_where_the_machine_allows_none() -> None:
    case = make_case("a", **DDP)
    assert separate(case, (EP, REPLICATE), 2, by_ranks=False) == {}
    assert suggest_layout(case, make_finding(2.0, EP, REPLICATE), 2).follow_up is None


def test_what_is_not_ambiguous_gets_no_proposal() -> None:
    case = make_case("a", **DDP)
    assert suggest_layout(case, make_finding(2.0, EP), 8).follow_up is None
    assert suggest_layout(case, make_finding(2.0, EP, REPLICATE, follows="w"), 8).follow_up is None
    shares = make_finding(2.0, EP, REPLICATE, cause=Cause.SHARE_WEIGHTS)
    assert suggest_layout(case, shares, 8).follow_up is None
    assert suggest_layout(case, make_finding(2.0, explanation=None), 8).follow_up is None
    asked = suggest_layout(case, make_finding(2.0, EP, REPLICATE), 8).follow_up
    assert (asked.layout, asked.axes) == ({"dp_replicate": 4}, ("ep", "dp_replicate"))
    assert asked.candidates == (EP, REPLICATE)


def follow(finding: Finding | None = None, **answer: Any) -> Finding:
    """Return the outcome of the question under dp_replicate 4, where ep stays 2."""
    case = make_case("a", **DDP)
    asking = suggest_layout(case, finding or make_finding(2.0, EP, REPLICATE), 8)
    asked = change_layout(case, asking.follow_up.layout)
    result = {"name": "b", "file": "", "verdict": "mismatch", "ranks": 4, "seconds": 1.0} | answer
    return merge(case, asking, asked, CaseResult.model_validate(result))


@pytest.mark.parametrize(("value", "left"), [(2.0, EP), (4.0, REPLICATE)])
def test_the_answer_names_the_axis_that_explains_both(value: float, left: Product) -> None:
    answered = follow(findings=(make_finding(value, left),))
    assert (answered.follow_up.outcome, answered.follow_up.left) == ("narrowed", (left,))
    assert answered.explanation.candidates == (left,)
    assert answered.place.axes == left.sources
    assert answered.follow_up.seen.factors[0].value == value


def test_an_inverse_is_followed_as_such() -> None:
    inverse = Product(over=("ep",)), Product(over=("dp_replicate",))
    answered = follow(make_finding(0.5, *inverse), findings=(make_finding(0.25),))
    assert answered.follow_up.left == (inverse[1],)
    answered = follow(make_finding(0.5, *inverse), findings=(make_finding(4.0),))
    assert answered.follow_up.outcome == "none-left"


def test_an_answer_that_fits_no_axis_leaves_none() -> None:
    answered = follow(findings=(make_finding(3.0),))
    assert (answered.follow_up.outcome, answered.follow_up.left) == ("none-left", ())
    assert answered.explanation.candidates == ()
    assert answered.explanation.factors[0].value == 2.0
    assert answered.place.axes == ()


def test_a_missing_reduction_is_followed_by_the_axis_that_is_named_again() -> None:
    def miss(*axes: Product) -> Finding:
        operation = Unreduced(axes=axes, num_replicas=2, factor=Factor(value=1.0))
        subject = Subject(quantity=Quantity.GRADIENT, tensors=("w",))
        explanation = Explanation(cause=Cause.MISSING_REDUCTION, subject=subject, operation=operation)
        return make_finding(1.0, explanation=explanation, code=explanation.cause.value)

    answered = follow(miss(EP, REPLICATE), findings=(miss(REPLICATE),))
    assert answered.follow_up.left == (REPLICATE,)
    assert answered.explanation.candidates == (REPLICATE,)


def test_the_factor_of_the_same_part_decides() -> None:
    balance, z = (
        Contribution(part=Part(term=term), factor=Factor(value=2.0, equals=(EP, REPLICATE)))
        for term in ("balance", "z")
    )
    doubled = Contribution(part=Part(term="balance"), factor=Factor(value=4.0))
    subject = Subject(quantity=Quantity.GRADIENT, tensors=("w",))

    def explain(*contributions: Contribution) -> Explanation:
        operation = Scaled(contributions=contributions)
        return Explanation(cause=Cause.TERM_SCALE, subject=subject, operation=operation)

    sizes = {"ep": 2, "dp_replicate": 4}
    assert find_left(explain(balance), explain(doubled), sizes) == (REPLICATE,)
    assert find_left(explain(balance, z), explain(doubled), sizes) == ()


def test_a_layout_that_shows_something_else_or_does_not_run_decides_nothing() -> None:
    other = make_finding(2.0, cause=Cause.FORWARD)
    shown = follow(findings=(other,)).follow_up
    assert (shown.outcome, shown.seen) == ("not-shown", other.explanation)
    right = follow(verdict="pass")
    assert (right.follow_up.outcome, right.follow_up.seen) == ("not-shown", None)
    assert right.explanation.candidates == (EP, REPLICATE)
    failed = follow(verdict="error", reason="rank 1 raised").follow_up
    assert (failed.outcome, failed.reason) == ("not-run", "rank 1 raised")


def test_axes_of_a_layout_without_experts_are_those_of_the_data() -> None:
    case = make_case("a", preset="gpt", dp_shard=2, tp=2)
    assert set(list_groups(case)) == {"dp_shard", "tp"}
    assert set(list_degrees(case)) == {"dp_shard", "tp", "all ranks"}


def test_experts_that_are_cut_over_other_ranks_have_axes_without_ep() -> None:
    case = make_case("a", dp_shard=2, tp=2, etp=4)
    assert list_groups(case)["etp"] == [[0, 1, 2, 3]]
    assert list_degrees(case) == {"etp": 4, "dp_shard": 2, "tp": 2, "all ranks": 4, "top_k": 3}
    case = make_case("a", dp_shard=2, tp=2, etp=1)
    assert list_groups(case)["efsdp"] == [[0, 1, 2, 3]]
    assert "etp" not in list_degrees(case)


def test_axes_of_one_layout_are_named_by_their_ranks() -> None:
    case = make_case("a", dp_shard=2, cp=2, ep=2)
    assert name_ranks(case, [0, 2]) == "dp_shard"
    assert name_ranks(case, [0, 1, 2, 3]) == "fsdp"
    assert name_ranks(case, [0, 3]) == "ranks 0, 3"
    assert list_groups(case)["fsdp"] == [[0, 1, 2, 3]]


def test_unions_of_axes_are_named_after_their_axes() -> None:
    case = make_case("a", dp_replicate=2, cp=2, tp=2)
    found = list_unions(case)
    assert found["dp_replicate and cp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert found["dp_replicate and cp and tp"] == [list(range(8))]
    assert set(found) == {
        *("dp_replicate", "cp", "tp", "dp_replicate and cp", "dp_replicate and tp", "cp and tp"),
        "dp_replicate and cp and tp",
    }
    assert "fsdp" in list_unions(make_case("a", dp_shard=2, cp=2))


def test_expert_axes_say_nothing_of_a_dense_tensor() -> None:
    case = make_case("a", tp=2, ep=2, etp=2, dp_shard=2)
    assert not axis_affects(case, "ep", "layers.1.attention.q_proj.weight")
    assert axis_affects(case, "ep", "layers.1.moe.router.weight")
    assert not axis_affects(case, "etp", "layers.1.moe.router.weight")
    assert axis_affects(case, "etp", "layers.1.moe.experts.up")
    assert axis_affects(case, "tp", "layers.1.attention.q_proj.weight")


def test_etp_beside_tp_says_nothing_without_ep() -> None:
    case = make_case("a", tp=2)
    assert not axis_affects(case, "etp", "layers.1.moe.experts.up")
    assert axis_affects(make_case("a", tp=2, dp_shard=2, ep=2, etp=2), "etp", "layers.1.moe.experts.up")
