"""From shards to verdicts: tensors out of bounds, their errors and ranks, and missing tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moeverify.cases.schema import CustomModel, Tolerance
from moeverify.cases.validation.load import build_case
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import ComparedFacts
from moeverify.results.finding import Finding
from moeverify.verification.checks.golden_tensors import CHECKS

SHAPE = (8, 6)
WHOLE = Region.whole(SHAPE)
HALVES = [Region.box(SHAPE, [range(4), range(6)]), Region.box(SHAPE, [range(4, 8), range(6)])]
TWO = {0: {"dp_shard": 0}, 1: {"dp_shard": 1}}
ONE: dict[int, dict[str, int]] = {0: {}}


def show_halves(ranks, tensor: Tensor) -> None:
    for rank, half in enumerate(HALVES):
        ranks.show(rank, half.take(tensor), half)


def find_one(judgement) -> Finding:
    (finding,) = judgement.findings
    return finding


def test_right_shards_pass_and_are_counted(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(TWO)
    show_halves(ranks, weight)
    judgement = ranks.judge()
    (check,) = judgement.checks
    assert judgement.findings == ()
    assert (check.name, check.verdict, check.tensors) == ("gradient", "pass", 1)
    assert check.worst is not None
    assert (check.worst.tensor, check.worst.error, check.worst.bound) == ("w", 0.0, 1e-10)


def test_a_factor_is_seen_as_scale_with_cosine_one(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(TWO)
    show_halves(ranks, 4.0 * weight)
    finding = find_one(ranks.judge())
    assert finding.scale == pytest.approx(4.0, rel=1e-14)
    assert finding.cosine == pytest.approx(1.0, rel=1e-14)
    assert finding.error == pytest.approx(3.0, rel=1e-14)
    assert finding.ranks == (0, 1)


def test_a_wrong_element_is_found_by_rank_and_global_index(run_ranks: Callable, weight: Tensor) -> None:
    wrong = weight.clone()
    wrong[6, 2] += 1.0
    ranks = run_ranks(TWO)
    show_halves(ranks, wrong)
    finding = find_one(ranks.judge())
    assert (finding.rank, finding.ranks, finding.coordinates) == (1, (1,), {"dp_shard": 1})
    assert finding.index == (6, 2)
    assert finding.expected == weight[6, 2]
    assert finding.actual == wrong[6, 2]
    assert finding.error == pytest.approx(float(1.0 / weight.norm()), rel=1e-13)


def test_the_error_is_that_of_the_whole_tensor(run_ranks: Callable, weight: Tensor) -> None:
    # An error of 1.5e-10 of one half's norm may be inside the bound of the whole, where it is judged.
    half = HALVES[0].take(weight)
    share = float(half.norm() / weight.norm())
    wrong = weight.clone()
    HALVES[0].put(wrong, half * (1 + 0.9e-10 / share))
    ranks = run_ranks(TWO)
    show_halves(ranks, wrong)
    (check,) = ranks.judge().checks
    assert check.verdict == "pass"
    assert check.worst is not None
    assert check.worst.error == pytest.approx(0.9e-10, rel=1e-4)


def test_the_worst_replica_is_judged(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(TWO)
    ranks.show(0, weight, WHOLE)
    ranks.show(1, 2.0 * weight, WHOLE)
    finding = find_one(ranks.judge())
    assert (finding.rank, finding.ranks) == (1, (1,))
    assert finding.error == pytest.approx(1.0, rel=1e-14)


def test_rounding_alone_makes_no_rank_and_no_tensor_the_worst(run_ranks: Callable, weight: Tensor) -> None:
    golden = {(0, "gradient", name): weight for name in ("first", "second")}
    ranks = run_ranks({0: {"dp_replicate": 0}, 1: {"dp_replicate": 1}}, golden)
    for name, factors in (("first", (2.0, 2.0 + 4e-15)), ("second", (2.0 + 8e-15, 2.0 + 8e-15))):
        for rank, factor in enumerate(factors):
            ranks.show(rank, factor * weight, WHOLE, name)
    judgement = ranks.judge()
    (check,) = [check for check in judgement.checks if check.name == "gradient"]
    assert check.worst.tensor == "first"
    assert [finding.rank for finding in judgement.findings] == [0, 0]


def test_a_gradient_that_never_came_is_an_error_of_its_whole_size(run_ranks: Callable) -> None:
    ranks = run_ranks(TWO)
    for rank, half in enumerate(HALVES):
        ranks.show(rank, None, half)
    finding = find_one(ranks.judge())
    assert finding.error == pytest.approx(1.0, rel=1e-14)
    assert finding.evidence == ("the run has no such tensor on ranks 0, 1",)


def test_a_replica_that_has_it_stands_for_one_that_has_not(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(TWO)
    ranks.show(0, None, WHOLE)
    ranks.show(1, 2.0 * weight, WHOLE)
    assert find_one(ranks.judge()).error == pytest.approx(1.0, rel=1e-14)


def test_what_the_golden_does_not_have_is_unexpected(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(ONE)
    ranks.show(0, weight, WHOLE, name="stranger")
    finding = find_one(ranks.judge())
    assert finding.tensor == "stranger"
    assert finding.evidence == ("the golden has no tensor of this name and size",)


def test_a_value_that_is_not_finite_is_said(run_ranks: Callable, weight: Tensor) -> None:
    wrong = weight.clone()
    wrong[3, 3] = math.nan
    ranks = run_ranks(TWO)
    show_halves(ranks, wrong)
    finding = find_one(ranks.judge())
    assert finding.error == math.inf
    assert finding.rank == 0
    assert finding.evidence == ("1 elements are not finite",)


def test_noise_where_the_golden_is_zero_is_measured_by_all_of_its_kind(
    run_ranks: Callable, weight: Tensor
) -> None:
    zero = torch.zeros(SHAPE, dtype=torch.float64)
    golden = {(0, "gradient", "w"): weight, (0, "gradient", "idle"): zero}
    size = float(weight.norm())
    for noise, verdict in ((1e-17, "pass"), (1e-12, "mismatch")):
        ranks = run_ranks(ONE, golden)
        ranks.show(0, weight, WHOLE)
        wrong = zero.clone()
        wrong[0, 0] = noise * size
        ranks.show(0, wrong, WHOLE, name="idle")
        assert ranks.judge().checks[0].verdict == verdict, noise


def test_exact_kinds_allow_nothing(run_ranks: Callable) -> None:
    ids = torch.arange(48).reshape(SHAPE)
    ranks = run_ranks(ONE, {(0, "router_ids", "r"): ids})
    other = ids.clone()
    other[7, 5] = 46
    ranks.show(0, other, WHOLE, name="r", kind="router_ids")
    finding = find_one(ranks.judge())
    assert (finding.check, finding.bound, finding.index) == ("routing", 0.0, (7, 5))


def test_checks_stand_in_the_order_of_a_step(run_ranks: Callable, weight: Tensor) -> None:
    golden = {(0, kind, "w"): weight for kind in ("update", "loss", "gradient")}
    ranks = run_ranks(ONE, golden)
    for kind in ("update", "gradient", "loss"):
        ranks.show(0, weight, WHOLE, kind=kind)
    assert [check.name for check in ranks.judge().checks] == ["loss", "gradient", "update"]


def test_a_fixed_tolerance_is_the_verdict(run_ranks: Callable, weight: Tensor) -> None:
    for rtol, verdict in ((1.1e-3, "pass"), (0.9e-3, "mismatch")):
        ranks = run_ranks(ONE, tolerance=Tolerance(kind="fixed", rtol=rtol, atol=0.0))
        ranks.show(0, weight * 1.001, WHOLE)
        assert ranks.judge().checks[0].verdict == verdict


def test_a_bound_that_allows_anything_is_counted_as_inconclusive(run_ranks: Callable, weight: Tensor) -> None:
    for rtol, number in ((0.4, 0), (0.6, 1)):
        ranks = run_ranks(ONE, tolerance=Tolerance(kind="fixed", rtol=rtol, atol=0.0))
        ranks.show(0, 1.3 * weight, WHOLE)
        (check,) = ranks.judge().checks
        assert (check.verdict, check.inconclusive) == ("pass", number)
        assert check.model_dump()["blind"] == number, "JSON keeps its key"


def test_second_moments_are_not_measured_beside_step_counters(run_ranks: Callable, weight: Tensor) -> None:
    small = 1e-9 * weight
    golden = {
        (0, "optimizer_state", "w.exp_avg_sq"): small,
        (0, "optimizer_state", "w.step"): torch.tensor(2.0),
    }
    ranks = run_ranks(ONE, golden)
    ranks.show(0, small * (1 + 1e-9), WHOLE, "w.exp_avg_sq", "optimizer_state")
    ranks.show(0, torch.tensor(2.0), Region.whole(()), "w.step", "optimizer_state")
    finding = find_one(ranks.judge())
    assert (finding.tensor, finding.bound) == ("w.exp_avg_sq", 1e-10)


SOURCES = {
    "seed": {"preset": "tiny-gpt"},
    "factory": {"factory": "module:make", "vocab_size": 8},
    "weights": {"factory": "module:make", "vocab_size": 8, "weights": "folder"},
}


@pytest.mark.parametrize("source", SOURCES)
def test_findings_of_initial_values_say_where_the_right_ones_come_from(
    source: str, run_ranks: Callable, weight: Tensor
) -> None:
    fields = {"name": "hand", "recipe": {"model": {"preset": "tiny-gpt"}}, "layout": {}}
    case = build_case(fields)
    if source != "seed":
        model = CustomModel.model_validate(SOURCES[source])
        case = case.model_copy(update={"recipe": case.recipe.model_copy(update={"model": model})})
    ranks = run_ranks(ONE, {(-1, Kind.INITIAL_WEIGHT, "w"): weight, (0, Kind.GRADIENT, "w"): weight})
    ranks.show(0, 2.0 * weight, WHOLE, kind=Kind.INITIAL_WEIGHT, step=-1)
    ranks.show(0, 2.0 * weight, WHOLE)
    shown = ranks.shown(case)
    outcomes = [outcome for check in CHECKS if (outcome := check.judge(shown, ())) is not None]
    facts = {finding.check: finding.facts for outcome in outcomes for finding in outcome.findings}
    assert facts == {CheckName.INITIAL_STATE: ComparedFacts(source=source), CheckName.GRADIENT: None}


def test_a_gradient_that_is_zero_but_for_rounding_vanishes(run_ranks: Callable, weight: Tensor) -> None:
    tiny = {
        (step, "gradient", name): tensor
        for step, name, tensor in (
            (0, "w", weight),
            (0, "k.bias", 1e-17 * weight),
            (0, "small", 1e-4 * weight),
        )
    }
    shown = run_ranks(ONE, tiny)
    for (_, _, name), tensor in tiny.items():
        shown.show(0, tensor, WHOLE, name=name)
    check = next(check for check in CHECKS if check.name == CheckName.GRADIENT)
    outcome = check.judge(shown.shown(), ())
    assert outcome is not None
    assert outcome.vanishing == {"k.bias"}
