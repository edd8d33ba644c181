"""Losses, right and with bugs, against sums over the rank's own token losses, router inputs and choices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.model import router as routers
from moeverify.results.finding import Finding
from moeverify.train import loop
from moeverify.train import objective as losses
from moeverify.train.objective import Losses
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks import wide_parts
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.checks.objective import LossSums, ObjectiveWatch, judge_losses

PRECISIONS = ("float64", "float32", "bfloat16")
SGD = {"name": "sgd", "lr": 0.1}
SOFTMAX = {"num_experts": 8, "top_k": 2, "expert_hidden": 8, "balance_coef": 0.01, "z_coef": 0.001}
SIGMOID = {**SOFTMAX, "score": "sigmoid", "num_groups": 4, "top_groups": 2, "balance_scope": "batch"}
Judge = Callable[..., CheckOutcome]
Train = Callable[..., tuple[Any, dict[int, LossSums]]]


@pytest.fixture
def train_watched(run_ranks: Callable, train_alone: Callable, make_one_device_case: Callable) -> Train:
    """Return a function that trains on one device and returns the shown tensors and the watch's report."""

    def do(moe: Mapping[str, Any] | None, precision: str) -> tuple[Any, dict[int, LossSums]]:
        case = make_one_device_case(SGD, precision, moe)
        by_row = moe is not None and "balance_scope" not in moe
        report = train_alone(case, lambda program: ObjectiveWatch(program, by_row=by_row, is_whole=True))
        return run_ranks({0: {}}).shown(case), report

    return do


@pytest.fixture
def judge(train_watched: Train) -> Judge:
    """Return a function that trains on one device and judges its losses."""

    def do(moe: Mapping[str, Any] | None, precision: str) -> CheckOutcome:
        shown, report = train_watched(moe, precision)
        return judge_losses(shown, [report])

    return do


def terms(outcome: CheckOutcome) -> set[str]:
    assert all(finding.facts is not None and not finding.code for finding in outcome.findings)
    return {finding.tensor for finding in outcome.findings}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("moe", [None, SOFTMAX, SIGMOID], ids=["dense", "softmax by row", "sigmoid by batch"])
def test_sound_losses_pass_and_all_of_them_are_judged(judge: Judge, moe: Any, precision: str) -> None:
    outcome = judge(moe, precision)
    assert outcome.findings == ()
    assert outcome.result.tensors == 3 * (2 if moe is None else 4)  # steps x losses


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("term", ["lm", "balance", "z"])
def test_a_term_that_is_off_by_a_thousandth_is_found_in_every_precision(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, term: str, precision: str
) -> None:
    original = Losses.named

    def scaled(self: Losses) -> dict[str, Tensor]:
        return {name: value * (1.001 if name == term else 1.0) for name, value in original(self).items()}

    monkeypatch.setattr(Losses, "named", scaled)
    assert terms(judge(SOFTMAX, precision)) == {term}


def test_a_total_that_lacks_a_term_is_found(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Losses.named
    monkeypatch.setattr(Losses, "named", lambda self: {**original(self), "total": self.lm + self.z})
    assert terms(judge(SOFTMAX, "bfloat16")) == {"total"}


@pytest.mark.parametrize("moe", [SOFTMAX, SIGMOID], ids=["by row", "by batch"])
def test_a_balance_loss_of_one_choice_too_few_is_found(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, moe: Any
) -> None:
    original = routers.summarize
    monkeypatch.setattr(
        routers, "summarize", lambda logits, p, ids, valid: original(logits, p, ids[..., :1], valid)
    )
    assert terms(judge(moe, "bfloat16")) == {"balance"}


def test_padding_that_counts_is_found_in_every_loss(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    original = losses.count_valid

    def count_all(batches: Any, sums: Any, num_rows: int) -> Any:
        right = original(batches, sums, num_rows)
        return losses.Normalizers(right.num_valid + 1, num_rows)

    monkeypatch.setattr(loop, "count_valid", count_all)
    assert terms(judge(SOFTMAX, "bfloat16")) == {"lm", "z"}  # the balance loss of a row has its own length


def test_ranks_that_see_the_same_tokens_count_once(train_watched: Train) -> None:
    shown, report = train_watched(SOFTMAX, "float32")
    assert judge_losses(shown, [report, report]).findings == ()
    assert judge_losses(shown, [report, report]).result.tensors == 12


def test_routers_whose_copies_have_drifted_apart_have_no_one_loss(train_watched: Train) -> None:
    shown, report = train_watched(SOFTMAX, "float32")
    drifted = copy.deepcopy(report)
    for sums in drifted[1].routers.values():
        sums.z[1] *= 1.001
    outcome = judge_losses(shown, [report, drifted])
    assert outcome.findings == ()
    assert {name for step, _, name in outcome.limits if step == 1} == {"lm"}
    assert {name for step, _, name in outcome.limits if step == 0} == {"lm", "balance", "z", "total"}


def test_what_was_not_seen_as_a_whole_is_not_judged(train_watched: Train) -> None:
    shown, report = train_watched(SOFTMAX, "float32")
    for sums in report.values():
        sums.token_losses.clear()
        for router in sums.routers.values():
            router.z[0] -= 1.0
            router.rows[0][0] += 1.0
    assert judge_losses(shown, [report]).result.tensors == 0


def test_what_one_rank_reports_otherwise_is_found_there(train_watched: Train) -> None:
    shown, report = train_watched(None, "float32")
    other = {
        step: LossSums(
            sums.token_losses, {}, {name: 2.0 * value for name, value in sums.losses.items()}, sums.eps
        )
        for step, sums in report.items()
    }
    found: tuple[Finding, ...] = judge_losses(shown, [report, other]).findings
    assert [(finding.tensor, finding.rank, finding.ranks) for finding in found[:1]] == [("lm", 1, (1,))]
    assert {finding.tensor for finding in found} == {"lm"}


def test_router_losses_of_a_layouts_own_are_not_judged(
    train_alone: Callable, run_ranks: Callable, make_one_device_case: Callable
) -> None:
    case = make_one_device_case(SGD, "float32", SOFTMAX)

    def make_watch(program: TrainingProgram) -> ObjectiveWatch:
        own = replace(program, own_router_losses=lambda: (torch.ones(()), torch.ones(())))
        return ObjectiveWatch(own, by_row=True, is_whole=True)

    outcome = judge_losses(run_ranks({0: {}}).shown(case), [train_alone(case, make_watch)])
    assert (outcome.findings, outcome.result.tensors) == ((), 3)  # lm of three steps


def test_of_a_stage_of_a_pipeline_lm_alone_is_judged(
    train_alone: Callable, run_ranks: Callable, make_one_device_case: Callable
) -> None:
    case = make_one_device_case(SGD, "float32", SOFTMAX)
    report = train_alone(case, lambda program: ObjectiveWatch(program, by_row=True, is_whole=False))
    outcome = judge_losses(run_ranks({0: {}}).shown(case), [report])
    assert {name for _, _, name in outcome.limits} == {"lm"}


def test_long_passes_are_added_up_in_chunks(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_parts, "_MOST_ELEMENTS", 100)
    outcome = judge(SOFTMAX, "float64")
    assert outcome.findings == ()
    assert {name for _, _, name in outcome.limits} == {"lm", "balance", "z", "total"}
