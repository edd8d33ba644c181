"""The calls of a user's own model that are recorded for a replay, of its loss too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrong_tensors import examine

from moeverify.case.schema import Case
from moeverify.diagnose.capture import Capture
from moeverify.diagnose.first_divergence import Known, find_origins
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.own.found import find_own_module
from moeverify.diagnose.rank_readings import RankReadings
from moeverify.results.own_module import Mistaken
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.module_taps import Tap
from moeverify.validation.load import load_valid_cases
from moeverify.worker.step_tap import StepTap

EXAMPLES = Path(__file__).parents[3] / "examples"
CPU = torch.device("cpu")


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.syspath_prepend(EXAMPLES)
    (found,) = load_valid_cases([EXAMPLES / "my_moe" / "ep.yaml"]).cases
    return found


def read(case: Case, breaks: Callable[[Any], None] = lambda model: None) -> Tap:
    """Return what a device reads at the modules in the first step, of a model that is broken first."""
    program = assemble_single(case.recipe, CPU, compute="float64")
    breaks(program.model)
    data = case.recipe.data
    tap = Tap(program.model, data.batch, data.seq_len, scale=1.0, limit=1 << 30, reads_loose=True)
    observer = StepTap(Capture(()), tap, 0)
    train(case.recipe, program, observer, num_steps=1)
    observer.close()
    return tap


def diagnose(case: Case, golden: Tap, actual: Tap) -> Mistaken | None:
    data = case.recipe.data
    shares = [(range(data.batch), range(data.seq_len))]
    ranks = [RankReadings(actual.readings, shares, frozenset(actual.silent))]
    search = find_origins(golden.readings, ranks, {0: {}}, 1, torch.float64, Known(loss_differs=True))
    origin = search.origins.get("forward") or search.origins["backward"]
    own = find_own_module(case, None, 0, origin, search, CPU)  # type: ignore[arg-type]  # of step 0 nothing is read
    assert own is not None
    found = examine(
        "own_module", origin.tensor, DiagnosisInputs(search=search, own=lambda _: own)
    ).explanation
    assert found is None or isinstance(found.operation, Mistaken)
    return found.operation if found is not None else None


@pytest.mark.slow
def test_a_coefficient_in_a_loss_of_ones_own_is_named_with_its_line(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    import my_moe.model as module

    def wrong(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        logits, scores = model(tokens)
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        return losses + 0.04 * sum((score.logsumexp(-1)[targets != -100] ** 2).sum() for score in scores)

    golden = read(case)
    with monkeypatch.context() as patch:
        patch.setattr(module, "loss", wrong)
        actual = read(case)
    found = diagnose(case, golden, actual)
    assert found is not None
    assert found.module == "the loss"
    (mistake,) = found.mistakes
    assert (mistake.part, mistake.way, mistake.before) == ("step", "fitted", "0.01")
    assert mistake.number == pytest.approx(0.04)
    assert mistake.line.startswith("model.py:")


def test_a_count_of_choices_is_named(case: Case) -> None:
    def choose_one(model: Any) -> None:
        model.tower[1].top_k = 1

    found = diagnose(case, read(case), read(case, choose_one))
    assert found is not None
    (mistake,) = found.mistakes
    assert (mistake.part, mistake.name, mistake.after, mistake.module) == (
        "attribute",
        "top_k",
        "1",
        "tower.1",
    )


def test_the_reference_model_has_formulas_of_its_own() -> None:
    (case,) = load_valid_cases([EXAMPLES.parent / "cases" / "ep2.yaml"]).cases
    assert find_own_module(case, None, 0, None, None, CPU) is None  # type: ignore[arg-type]
