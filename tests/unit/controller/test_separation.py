"""Which layout tells axes apart, and what its answer makes of a finding."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.axes.groups import axis_affects, list_degrees, list_groups, name_ranks
from moeverify.controller.follow_up import merge
from moeverify.controller.separation import change_layout, count_apart, propose, separate
from moeverify.faults.setting import make_case
from moeverify.results.finding import Finding, Place
from moeverify.results.run import CaseResult
from moeverify.validation.rules import validate

DDP = {"dp_replicate": 2, "data_parallel": "ddp", "ep": 2}
FACTOR = "every value is 2 = ep or dp_replicate (alike here: this layout cannot tell) times the right one"


def make_finding(axes: tuple[str, ...], **fields: Any) -> Finding:
    content = {
        "check": "gradient",
        "tensor": "layers.1.moe.experts.up",
        "step": 0,
        "rank": 0,
        "error": 1.0,
        "bound": 1e-10,
        "code": "scale",
        "scale": 2.0,
        "cause": FACTOR,
        "where": f"axis {', '.join(axes)}",
        "place": Place(axes=axes),
    }
    return Finding.model_validate(content | fields)


@pytest.mark.parametrize(
    ("layout", "axes", "by_ranks"),
    [
        (DDP, ("ep", "dp_replicate"), False),
        (DDP, ("dp_replicate", "ep"), True),
        ({"dp_shard": 4, "ep": 2}, ("efsdp", "ep"), False),
        ({"dp_shard": 4, "ep": 2}, ("efsdp / dp_shard", "ep / dp_shard"), False),
        ({"dp_shard": 2, "tp": 2}, ("dp_shard", "tp"), False),
        ({"dp_shard": 2, "micro_batches": 2}, ("dp_shard", "micro-batches"), False),
    ],
)
def test_a_separating_layout_is_valid_and_has_every_axis(
    layout: dict[str, Any], axes: tuple[str, ...], by_ranks: bool
) -> None:
    case = make_case("a", **layout)
    changed = separate(case, axes, 8, by_ranks=by_ranks)
    other = change_layout(case, changed)
    assert changed
    assert validate(other) == []
    assert other.layout.world_size <= 8
    assert count_apart(case, axes, by_ranks=by_ranks) == 1
    assert count_apart(other, axes, by_ranks=by_ranks) == len(axes)


def test_no_layout_is_proposed_where_the_machine_allows_none() -> None:
    case = make_case("a", **DDP)
    assert separate(case, ("ep", "dp_replicate"), 2, by_ranks=False) == {}
    assert propose(case, make_finding(("ep", "dp_replicate")), 2).follow_up is None


def test_what_is_not_ambiguous_gets_no_proposal() -> None:
    case = make_case("a", **DDP)
    assert propose(case, make_finding(("ep",)), 8).follow_up is None
    assert propose(case, make_finding(("ep", "dp_replicate"), code="forward"), 8).follow_up is None
    assert propose(case, make_finding(("ep", "dp_replicate")), 8).follow_up.layout == {"dp_replicate": 4}


def follow(**answer: Any) -> Finding:
    """Return what comes of the question under dp_replicate 4, where ep stays 2."""
    case = make_case("a", **DDP)
    finding = propose(case, make_finding(("ep", "dp_replicate")), 8)
    asked = change_layout(case, finding.follow_up.layout)
    result = {"name": "b", "file": "", "verdict": "mismatch", "ranks": 4, "seconds": 1.0} | answer
    return merge(case, finding, asked, CaseResult.model_validate(result))


@pytest.mark.parametrize(("scale", "axis"), [(2.0, "ep"), (4.0, "dp_replicate")])
def test_the_answer_names_the_axis_that_explains_both(scale: float, axis: str) -> None:
    settled = follow(findings=(make_finding((axis,), scale=scale, cause=f"{scale:g} times"),))
    assert settled.follow_up.answer == (
        f"axis {axis}: followed up under {{dp_replicate: 4}}, where {scale:g} times"
    )
    assert settled.place.axes == (axis,)
    assert settled.where == f"axis {axis}"
    assert settled.cause == f"every value is 2 = {axis} times the right one"


def test_an_answer_that_fits_no_axis_settles_nothing() -> None:
    settled = follow(findings=(make_finding((), scale=3.0, cause="3 times"),))
    assert settled.follow_up.answer.startswith("none of these axes: followed up")
    assert settled.cause == FACTOR


def test_a_layout_that_shows_something_else_or_does_not_run_is_said() -> None:
    other = make_finding((), code="forward", cause="the router is wrong")
    assert "does not show it: the router is wrong" in follow(findings=(other,)).follow_up.answer
    assert "nothing differs there" in follow(verdict="pass").follow_up.answer
    assert "did not run: rank 1 raised" in follow(verdict="error", reason="rank 1 raised").follow_up.answer


def test_axes_of_a_layout_without_experts_are_those_of_the_data() -> None:
    case = make_case("a", preset="gpt", dp_shard=2, tp=2)
    assert set(list_groups(case)) == {"dp_shard", "tp"}
    assert set(list_degrees(case)) == {"dp_shard", "tp", "all ranks"}


def test_experts_that_are_cut_over_other_ranks_have_axes_without_ep() -> None:
    case = make_case("a", dp_shard=2, tp=2, etp=4)
    assert list_groups(case)["etp"] == [[0, 1, 2, 3]]
    assert list_degrees(case) == {"etp": 4, "dp_shard": 2, "tp": 2, "all ranks": 4}
    case = make_case("a", dp_shard=2, tp=2, etp=1)
    assert list_groups(case)["efsdp"] == [[0, 1, 2, 3]]
    assert "etp" not in list_degrees(case)


def test_axes_of_one_layout_are_named_by_their_ranks() -> None:
    case = make_case("a", dp_shard=2, cp=2, ep=2)
    assert name_ranks(case, [0, 2]) == "dp_shard"
    assert name_ranks(case, [0, 1, 2, 3]) == "fsdp"
    assert name_ranks(case, [0, 3]) == "ranks 0, 3"
    assert list_groups(case)["fsdp"] == [[0, 1, 2, 3]]


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
