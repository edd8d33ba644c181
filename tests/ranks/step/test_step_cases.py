"""A user's own `train_step` in a case: a right one passes, and bugs of its loop are found and named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from moeverify.cases.validation.load import load_cases
from moeverify.report.words.run import word_case, word_finding
from moeverify.results.facts import OwnStep
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult
from moeverify.results.script import CallFacts
from moeverify.results.step_facts import RecomputedFacts
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = (
    *("right", "zeroes_inside", "never_zeroes", "schedules_inside", "counts_replicas"),
    *("cubes", "cubes_by_rank", "schedules_by_rank"),
)
CASE = """
name: {step}
recipe:
  name: {step}
  model:
    factory: "my_moe.model:make"
    loss: "my_moe.model:loss"
    arguments: {{width: 8, num_layers: 1, num_experts: 4}}
    vocab_size: 80
  data: {{batch: 8, seq_len: 8, min_valid: 0.5}}
  optimizer: {{name: adamw, lr: 0.01, schedule: linear}}
  steps: 2
  step: "own_steps:{step}"
layout: {{dp_shard: 2, micro_batches: 2, parallelize: "own_steps:parallelize"}}
"""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CaseResult]:
    """Return the case of each step, all run in one launch of two ranks."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "own_steps.py").write_text((PROGRAMS / "own_steps.py").read_text())
    (folder / "my_moe").symlink_to(EXAMPLES / "my_moe")
    files = [folder / f"{step}.yaml" for step in STEPS]
    for step, file in zip(STEPS, files, strict=True):
        file.write_text(CASE.format(step=step))
    options = RunOptions(
        device="cpu",
        golden_folder=folder / "golden",
        cache_folder=folder / "cache",
        explain_seconds=0.0,  # these tests are about the checks
    )
    result = run_cases(load_cases(files), options, lambda event: None)
    assert result is not None
    return {case.name: case for case in result.cases}


def find_lead(case: CaseResult) -> Finding:
    lead = case.lead
    assert lead is not None
    return lead


def test_a_right_step_passes_and_says_what_did_not_run(cases: Mapping[str, CaseResult]) -> None:
    case = cases["right"]
    assert (case.verdict, case.reason) == ("pass", "")
    checks = {check.name: check for check in case.checks}
    # zero_grad, two backward passes and the optimizer's step, in two steps of two ranks.
    assert checks["order of calls"].tensors == 16
    assert {"gradient", "gradient norm", "clip", "update", "optimizer step"} <= checks.keys()
    (note,) = [note for note in case.notes if "not exercised" in note]
    assert "own_steps:right" in note
    assert "zero_grad" not in note


@pytest.mark.parametrize(
    ("step", "number", "line"),
    [
        ("zeroes_inside", 0, "optimizer.zero_grad()"),
        ("never_zeroes", 1, "(loss(self.model"),
        ("schedules_inside", 0, "scheduler.step()"),
    ],
)
def test_calls_in_a_wrong_order_lead_with_their_line(
    cases: Mapping[str, CaseResult], step: str, number: int, line: str
) -> None:
    lead = find_lead(cases[step])
    assert isinstance(lead.facts, CallFacts)
    assert (lead.check, lead.step, lead.ranks) == ("order of calls", number, (0, 1))
    file, _, place = lead.facts.site.partition(":")
    assert file == "own_steps.py"
    assert (PROGRAMS / file).read_text().splitlines()[int(place) - 1].strip().startswith(line)
    # Every tensor that is wrong by then is a consequence.
    assert {each.follows for each in cases[step].findings if each is not lead} == {lead.tensor}


def test_a_norm_that_counts_replicas_twice_is_named(cases: Mapping[str, CaseResult]) -> None:
    lead = find_lead(cases["counts_replicas"])
    assert (lead.check, lead.tensor, lead.code) == ("clip", "total", "norm")
    assert "2 times" in word_finding(lead).cause
    assert not [
        each for each in cases["counts_replicas"].findings if (each.check, each.step) == ("gradient", 0)
    ]


def test_what_one_device_makes_of_gradients_before_its_step_is_held_to_the_golden_alone(
    cases: Mapping[str, CaseResult],
) -> None:
    right, wrong = cases["cubes"], cases["cubes_by_rank"]
    assert (right.verdict, right.findings) == ("pass", ())
    (checked,) = [check for check in right.checks if check.name == "optimizer step"]
    assert isinstance(checked.facts, OwnStep)
    assert checked.facts.num_tensors > 1
    (note,) = [note for note in word_case(right).notes if note.startswith("optimizer step")]
    assert "`own_steps:cubes`" in note
    assert wrong.verdict == "mismatch"
    assert {each.kind for each in wrong.findings if each.step == 0} <= {"update", "weight", "optimizer_state"}


def test_the_rate_that_the_optimizer_has_in_a_users_own_step_is_told(cases: Mapping[str, CaseResult]) -> None:
    lead = find_lead(cases["schedules_by_rank"])
    assert (lead.check, lead.step) == ("optimizer step", 1)
    assert isinstance(lead.facts, RecomputedFacts)
    assert (lead.facts.rate, lead.facts.scheduled) == (0.0, pytest.approx(0.005))
    assert all(each.follows for each in cases["schedules_by_rank"].findings if each is not lead)
