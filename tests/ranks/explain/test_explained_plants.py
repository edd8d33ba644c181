"""Mistakes in a model that is split over two ranks by hand are located at their lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.validation.load import load_cases
from moeverify.explain.fitting.order import MECHANISMS
from moeverify.report.operator_file import read
from moeverify.report.words.run import word_finding
from moeverify.results.run import CaseResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

PROGRAM = Path(__file__).parent / "programs" / "planted_ffn.py"
MISTAKES = ("wrong_number", "missing_sum", "missing_gradient_sum")

Results = Mapping[str, CaseResult]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """Return a function that runs layouts of `PROGRAM` in one launch and returns their outcomes."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / PROGRAM.name).write_text(PROGRAM.read_text())

    def do(names: Sequence[str], **asked: Any) -> Results:
        for name in names:
            (folder / f"{name}.yaml").write_text(
                "recipe:\n  name: planted\n  model: {factory: 'planted_ffn:Model', vocab_size: 32}\n"
                "  data: {batch: 4, seq_len: 8}\n  steps: 1\n  precision: float64\n"
                f"layout: {{tp: 2, parallelize: 'planted_ffn:{name}'}}\nchecks: {{repeat: never}}\n"
            )
        options = RunOptions(
            device="cpu",
            golden_folder=folder / "golden",
            cache_folder=folder / "cache",
            folder=folder / "kept",
            **asked,
        )
        cases = load_cases([folder / f"{name}.yaml" for name in names])
        result = run_cases(cases, options, lambda event: None)
        assert result is not None
        return {case.name: case for case in result.cases}

    return do


@pytest.fixture(scope="module")
def results(run: Callable[..., Results]) -> Results:
    return run(["right", *MISTAKES])


def find_line(name: str) -> int:
    """Return the line number at which a mistake must be located."""
    lines = PROGRAM.read_text().splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if f"PLANTED {name}" in line)
    return found


def test_what_is_right_passes(results: Results) -> None:
    assert (results["right"].verdict, results["right"].findings) == ("pass", ())


@pytest.mark.parametrize("name", MISTAKES)
def test_the_planted_line_leads_or_is_evidence_for_the_cause_that_is_named(
    results: Results, name: str
) -> None:
    first, *others = results[name].findings
    culprit = first.culprit
    assert culprit is not None
    # No check and no hypothesis names the number; both sums are named.
    assert (culprit.leads, culprit.ranks, first.follows) == (name == "wrong_number", (0, 1), "")
    lines = [each.line for each in (culprit.here, *culprit.between) if each.line is not None]
    assert (PROGRAM.name, find_line(name)) in [(Path(line.file).name, line.line) for line in lines]
    assert {each.follows for each in others} == {first.tensor}
    said = word_finding(first)
    assert any(f"{PROGRAM.name}:" in line for line in (said.cause, *said.evidence))


def test_the_operators_of_both_sides_are_kept_and_stop_matching_at_the_planted_line(results: Results) -> None:
    assert results["right"].operators == ""
    table = read(Path(results["wrong_number"].operators))
    assert {op.phase for op in table.actual[0].operators} == {"forward", "backward", "step"}
    assert {rank for rank, _ in table.causes} == {0, 1}
    for (rank, place), (listed, compared) in zip(
        table.causes, zip(table.actual, table.compared, strict=True), strict=True
    ):
        site = listed.sites[listed.operators[place].sites[0]]
        assert (Path(site.file).name, site.line) == (PROGRAM.name, find_line("wrong_number"))
        before = {each.outcome for each in compared[:place]}
        assert compared[place].outcome == "differs"
        assert table.expected[0].operators[compared[place].other].name == listed.operators[place].name
        assert before <= {"match", "alone", "uncompared"}, rank
        sharded = [
            each.place for op, each in zip(listed.operators, compared, strict=True) if op.module == "ffn"
        ]
        assert f"dim 2: {8 * rank}-{8 * rank + 7} of 16" in sharded


def test_without_time_nothing_is_searched(run: Callable[..., Results]) -> None:
    case = run(["wrong_number"], explain_seconds=0.0)["wrong_number"]
    assert case.verdict == "mismatch"
    assert [finding.culprit for finding in case.findings if finding.culprit is not None] == []
    assert case.operators == ""


def test_without_hypotheses_the_first_wrong_operation_leads(run: Callable[..., Results]) -> None:
    first = run(["missing_sum"], without=MECHANISMS)["missing_sum"].findings[0]
    assert first.explanation is None
    assert first.culprit is not None
    assert first.culprit.leads
