"""Token losses of real training on one device, right and with bugs, recomputed from the head's own logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeverify.faults.setting import make_case
from moeverify.report.words.check import describe_facts
from moeverify.train.data import IGNORED
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.checks.cross_entropy import CrossEntropyWatch, compare, compute, judge_rows
from moeverify.verification.checks.data_source import ExpectedData

SGD = {"name": "sgd", "lr": 0.1}
PRECISIONS = ("float64", "float32", "bfloat16", "mixed")


@pytest.fixture
def judge(
    run_ranks: Callable, train_alone: Callable, make_one_device_case: Callable
) -> Callable[[str], CheckOutcome]:
    """Return a function that trains on one device in a precision and judges its token losses."""

    def do(precision: str) -> CheckOutcome:
        case = make_one_device_case(SGD, precision)
        alone = case.model_copy(update={"layout": type(case.layout)()})
        rows = train_alone(alone, lambda program: CrossEntropyWatch(alone, program, 0))
        assert len(rows) == case.recipe.steps
        return judge_rows(run_ranks({0: {}}).shown(), [rows])

    return do


def lose_by(monkeypatch: pytest.MonkeyPatch, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the reference model's loss by `loss` of logits (N, V) and labels (N)."""

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return loss(logits.flatten(0, 1), targets.flatten()).to(wide).view(targets.shape)

    monkeypatch.setattr("moeverify.train.forward.cross_entropy", cross_entropy)


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)


def say(outcome: CheckOutcome) -> set[str]:
    return {describe_facts(finding.facts, finding).cause for finding in outcome.findings}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sound_losses_pass(judge: Callable, precision: str) -> None:
    outcome = judge(precision)
    assert outcome.findings == ()
    assert outcome.result.verdict == "pass"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cross_entropy_in_16_bits_is_named(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    lose_by(monkeypatch, lambda logits, labels: plain(logits.to(dtype), labels))
    name = str(dtype).removeprefix("torch.")
    said = f"the cross entropy is computed in {name}: token losses hold only values that it can represent"
    assert say(judge(precision)) == {said}


def over_a_part(logits: Tensor, labels: Tensor) -> Tensor:
    """Leave the second half of the vocabulary out of the sum."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = wide.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (wide[:, : wide.shape[1] // 2].logsumexp(1) - chosen) * (labels != IGNORED)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(
        wide, labels, reduction="none", ignore_index=IGNORED, label_smoothing=0.01
    )


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("loss", [over_a_part, smoothed])
def test_another_loss_is_found_in_16_bits_too(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str, loss: Any
) -> None:
    lose_by(monkeypatch, loss)
    assert say(judge(precision)) == {"the token losses are not the cross entropy of the rank's own logits"}


def test_logits_that_are_no_numbers_are_for_others_to_report() -> None:
    logits = torch.full((2, 8), torch.nan)
    logits[1] = 1.0
    passed = compute(logits, torch.tensor([1, 2]), torch.arange(2))
    assert passed.losses.isfinite().tolist() == [False, True]
    assert compare(0, passed, torch.tensor([torch.nan, 9.0])).ratio.gt(1.0).tolist() == [False, True]


def test_labels_of_a_ranks_own_rows_are_those_of_the_whole_batch() -> None:
    case = make_case("c", data={"min_valid": 0.3}, cp=2, dp_shard=2, micro_batches=2)
    expected = ExpectedData(case)
    for rank, number, step in product(range(4), range(2), range(2)):
        cut = expected.cut(rank, number)
        own = expected.make_labels(step, cut, torch.device("cpu"))
        assert torch.equal(own, expected.labels(step, cut))
