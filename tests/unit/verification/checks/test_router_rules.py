"""Routers with other selection or weighting rules than the recipe's, identified from their own inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.explain.fitting.recomputed import join_alike
from moeverify.faults.setting import make_case
from moeverify.model import router as routers
from moeverify.model.router import Router
from moeverify.report.words.router import WAYS, describe_rules
from moeverify.results.facts import RouterFacts
from moeverify.verification.checks.base import Outcome
from moeverify.verification.checks.router import RouterWatch, judge_routers
from moeverify.verification.checks.router_rules import list_choice_parts, list_weight_parts

SOFTMAX = {"num_experts": 16, "top_k": 3, "expert_hidden": 8, "renormalize": False}
GROUPS = {"num_groups": 4, "top_groups": 2}
SIGMOID = {**SOFTMAX, **GROUPS, "score": "sigmoid", "selection_bias_rate": 0.3, "route_scale": 2.5}
Judge = Callable[..., Outcome]


@pytest.fixture
def judge(run_ranks: Callable, train_alone: Callable, make_one_device_case: Callable) -> Judge:
    """Return a function that trains on one device and judges its routers."""
    shown = run_ranks({0: {}}).shown()

    def do(moe: dict[str, Any], precision: str) -> Outcome:
        case = make_one_device_case({"name": "sgd", "lr": 0.1}, precision, moe)
        return judge_routers(shown, [train_alone(case, lambda program: RouterWatch(program.model))])

    return do


def list_rules(outcome: Outcome) -> set[str | None]:
    assert outcome.findings
    return {finding.facts.rule for finding in outcome.findings}


def choose_by(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Let routers choose by `change` of the recipe, the scores, and the scores with the bias."""
    choose = routers.choose

    def choose_otherwise(self: Router, scores: Tensor) -> tuple[Tensor, Tensor]:
        biased = scores if self.selection_bias is None else scores + self.selection_bias
        return choose(*change(self.spec, scores, biased))

    monkeypatch.setattr(Router, "_choose", choose_otherwise)


CHOICES: dict[str, Callable[..., Any]] = {
    "without-groups": lambda spec, scores, biased: (spec.model_copy(update={"top_groups": 4}), biased),
    "groups-by-two": lambda spec, scores, biased: (
        spec.model_copy(update={"group_score": "top2_sum"}),
        biased,
    ),
    "without-bias": lambda spec, scores, biased: (spec, scores),
    "opposite-bias": lambda spec, scores, biased: (spec, 2.0 * scores - biased),
}


@pytest.mark.parametrize("precision", ["float64", "bfloat16", "mixed"])
@pytest.mark.parametrize("rule", CHOICES)
def test_the_rule_of_another_choice_is_named(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, rule: str, precision: str
) -> None:
    choose_by(monkeypatch, CHOICES[rule])
    assert rule in list_rules(judge(SIGMOID, precision))
    assert rule in WAYS


@pytest.mark.parametrize("precision", ["float64", "bfloat16", "mixed"])
@pytest.mark.parametrize("moe", [SOFTMAX, SIGMOID], ids=["softmax", "groups"])
@pytest.mark.parametrize(
    ("places", "rule"),
    [
        ([0], "best-1"),
        ([0, 1], "best-2"),
        ([0, 1, 2, 3, 4], "best-5"),
        ([0, 0, 0], "best-1-in-3"),
        ([0, 1, 0], "best-2-in-3"),
        ([0, 1, 2, 2], "best-3-in-4"),
        ([0, 2, 3, 4], None),
        ([1, 2], None),
    ],
)
def test_other_numbers_of_experts_are_named(
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    moe: dict[str, Any],
    places: list[int],
    rule: str | None,
    precision: str,
) -> None:
    choose = Router._choose

    def choose_otherwise(self: Router, scores: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        self.spec = spec.model_copy(update={"top_k": 6})
        try:
            ids, margin = choose(self, scores)
        finally:
            self.spec = spec
        return ids[..., places], margin

    monkeypatch.setattr(Router, "_choose", choose_otherwise)
    chosen = {each.facts.rule for each in judge(moe, precision).findings if each.facts.quantity == "choice"}
    assert chosen == {rule}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("best-1", "gives each token its best 1 expert in place of 2"),
        (
            "best-1-in-2",
            "gives each token the best expert more than once, in 2 choices",
        ),
        ("best-1-to-5", "gives tokens from 1 to 5 of their best experts in place of 2"),
    ],
)
def test_numbers_of_experts_have_words(rule: str, said: str) -> None:
    assert (
        describe_rules(
            RouterFacts(quantity="choice", num_wrong=1, num_tokens=2, rule=rule, numbers={rule: 2.0})
        )
        == said
    )


def test_a_choice_by_no_known_rule_has_none(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_by(monkeypatch, lambda spec, scores, biased: (spec, biased.roll(1, -1)))
    assert list_rules(judge(SIGMOID, "float64")) == {None}


WEIGHTS: dict[str, tuple[dict[str, Any], Callable[[Router, Tensor], Tensor]]] = {
    "sigmoid-scores": (SOFTMAX, lambda router, logits: logits.sigmoid()),
    "softmax-scores": (SIGMOID, lambda router, logits: logits.softmax(-1)),
    "with-bias": (SIGMOID, lambda router, logits: logits.sigmoid() + router.selection_bias),
    "softmax-scores+with-bias": (SIGMOID, lambda router, logits: logits.softmax(-1) + router.selection_bias),
    "softmax-scores+with-bias+without-scale": (
        SIGMOID,
        lambda router, logits: (logits.softmax(-1) + router.selection_bias) / router.spec.route_scale,
    ),
}


@pytest.mark.parametrize("precision", ["float64", "bfloat16", "mixed"])
@pytest.mark.parametrize("rule", WEIGHTS)
def test_scores_that_are_others_for_the_weights_alone_are_named(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, rule: str, precision: str
) -> None:
    moe, score = WEIGHTS[rule]
    seen: list[Tensor] = []
    compute, weigh = Router.compute_logits, Router.weigh

    def keep(self: Router, x: Tensor) -> Tensor:
        logits = compute(self, x)
        seen[:] = [score(self, logits), self.score(logits)]
        return logits

    def weigh_otherwise(self: Router, chosen: Tensor) -> Tensor:
        other, right = seen
        ids = (right.unsqueeze(-2) == chosen.unsqueeze(-1)).long().argmax(-1)
        return weigh(self, other.gather(-1, ids))

    monkeypatch.setattr(Router, "compute_logits", keep)
    monkeypatch.setattr(Router, "weigh", weigh_otherwise)
    outcome = judge(moe, precision)
    assert rule in list_rules(outcome)
    # The bias is zero in the first step, so later steps identify its rule.
    first = {each.facts.rule for each in outcome.findings if each.step == 0}
    assert "with-bias" not in rule or first <= {rule}


@pytest.mark.parametrize(
    ("moe", "change", "rule"),
    [
        (SIGMOID, {"route_scale": 1.0}, "without-scale"),
        (SIGMOID, {"route_scale": 6.25}, "scale-twice"),
        (SOFTMAX, {"renormalize": True}, "of-chosen"),
        ({**SOFTMAX, "top_k": 1}, {"renormalize": True}, None),
        ({**SIGMOID, "renormalize": False}, {"renormalize": True}, "normalized"),
        ({**SOFTMAX, "renormalize": True}, {"renormalize": False}, "not-normalized"),
        (SIGMOID, {"route_scale": 2.6}, "other-scale"),
    ],
)
def test_weights_of_another_recipe_are_named(
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    moe: dict[str, Any],
    change: dict[str, Any],
    rule: str | None,
) -> None:
    weigh = Router.weigh

    def weigh_otherwise(self: Router, chosen: Tensor) -> Tensor:
        spec = self.spec
        self.spec = spec.model_copy(update=change)
        try:
            return weigh(self, chosen)
        finally:
            self.spec = spec

    monkeypatch.setattr(Router, "weigh", weigh_otherwise)
    assert list_rules(judge(moe, "bfloat16")) == {rule}


def test_a_softmax_of_the_allowed_groups_alone_is_named(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = Router.score

    def score_allowed(self: Router, logits: Tensor) -> Tensor:
        grouped = logits.unflatten(-1, (4, -1))
        best = grouped.amax(-1).topk(2, dim=-1).indices
        kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        return score(self, grouped.where(kept.unsqueeze(-1), -torch.inf).flatten(-2))

    monkeypatch.setattr(Router, "score", score_allowed)
    assert "of-allowed" in list_rules(judge({**SOFTMAX, **GROUPS}, "bfloat16"))


def by_warmth(self: Router, logits: Tensor) -> Tensor:
    return torch.softmax(1.7 * logits, dim=-1) if self.spec.score == "softmax" else (0.4 * logits).sigmoid()


@pytest.mark.parametrize("moe", [SOFTMAX, {**SOFTMAX, "renormalize": True}, {**SIGMOID, "renormalize": True}])
def test_a_temperature_is_measured_and_leads_the_choice(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, moe: dict[str, Any]
) -> None:
    monkeypatch.setattr(Router, "score", by_warmth)
    heads = [each for each in join_alike(judge(moe, "float64").findings) if not each.follows]
    assert {each.facts.rule for each in heads} == {"other-temperature"}
    wanted = 1.7 if moe.get("score") != "sigmoid" else 0.4
    assert all(each.facts.numbers["other-temperature"] == pytest.approx(wanted) for each in heads)


def by_epsilon(self: Router, chosen: Tensor) -> Tensor:
    return self.spec.route_scale * chosen / (chosen.sum(dim=-1, keepdim=True) + 0.02)


def by_squares(self: Router, chosen: Tensor) -> Tensor:
    return self.spec.route_scale * chosen / chosen.square().sum(dim=-1, keepdim=True).sqrt()


def by_two_mistakes(self: Router, chosen: Tensor) -> Tensor:
    return chosen / chosen.amax(dim=-1, keepdim=True)


def by_power(self: Router, chosen: Tensor) -> Tensor:
    return chosen**1.3


@pytest.mark.parametrize(
    ("weigh", "rule"),
    [
        (by_epsilon, "other-epsilon"),
        (by_squares, "divided-by-root-of-squares"),
        (by_two_mistakes, "divided-by-best+without-scale"),
        (by_power, None),
    ],
)
def test_the_parts_of_weights_are_told_apart(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, weigh: Callable[..., Tensor], rule: str | None
) -> None:
    monkeypatch.setattr(Router, "weigh", weigh)
    assert list_rules(judge({**SIGMOID, "renormalize": True}, "float64")) == {rule}


def test_every_way_has_words() -> None:
    moe = make_case("ways", moe={**SIGMOID, "group_score": "max"}).recipe.model.moe
    assert moe is not None
    specs = [
        moe.model_copy(update={"score": score, "renormalize": way})
        for score in ("softmax", "sigmoid")
        for way in (True, False)
    ]
    parts = [list_choice_parts(spec, has_bias=True) for spec in specs]
    parts += [list_weight_parts(spec, has_bias=True) for spec in specs]
    ways = {way for each in parts for part in each.values() for way in part}
    facts = RouterFacts(
        quantity="weights",
        num_wrong=1,
        num_tokens=2,
        rule="worst",
        rivals=tuple(ways),
        numbers=dict.fromkeys(ways, 2.0),
    )
    assert describe_rules(facts)
