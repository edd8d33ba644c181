"""The smaller cases of a case: which of them show its finding, and the smallest one at each moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases
from moeverify.results.culprit import CodeLine, Culprit, Operation
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller import smaller_cases
from moeverify.verification.controller.judgement import JudgementCache
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.smaller_cases import SmallerCases

CASE = """\
recipe:
  model: {vocab_size: 64, hidden: 32, num_layers: 4, num_heads: 4, num_kv_heads: 4, head_dim: 8, ffn_hidden: 64}
  data: {batch: 8, seq_len: 16}
  steps: 2
layout: {dp_shard: 2}
"""

Answer = tuple[str, bool] | None
"""The first wrong line of a case, and whether it is proved; None for a pass."""


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SmallerCases]:
    """Return a function that begins with cases whose results, or the end of the program, are answers."""
    file = tmp_path / "case.yaml"
    file.write_text(CASE)

    def do(*answers: Answer | BaseException) -> SmallerCases:
        left: Iterator[Answer | BaseException] = iter(answers)

        def run_cases(
            cases: Sequence[Case], options: RunOptions, on_event: Callable[[Event], Any]
        ) -> RunResult:
            results = []
            for case in cases:
                answer = next(left)
                if isinstance(answer, BaseException):
                    raise answer
                results.append(_make_result(case.name, answer))
                on_event(Event(kind="case-end", case=case.name, result=results[-1]))
            return RunResult(verdict="mismatch", environment={}, cases=tuple(results))

        monkeypatch.setattr(smaller_cases, "run_cases", run_cases)
        (case,) = load_cases([file])
        cache = JudgementCache(tmp_path / "judgements.json")
        cases = SmallerCases(case, [file], (), None, RunOptions(), lambda event: None, cache)
        cases.begin()
        return cases

    return do


def _make_result(name: str, answer: Answer) -> CaseResult:
    if answer is None:
        return CaseResult(name=name, file="", verdict="pass", ranks=1, seconds=0.0)
    line, is_proved = answer
    culprit = Culprit(
        mechanism="operator" if is_proved else "place",
        proved=is_proved,
        here=Operation(operator="aten.mm", line=CodeLine(file=line, line=1)),
        leads=True,
    )
    finding = Finding(
        check="gradient",
        tensor="w",
        step=0,
        rank=0,
        ranks=(0,),
        error=1.0,
        bound=0.0,
        code="scale",
        culprit=culprit,
    )
    return CaseResult(name=name, file="", verdict="mismatch", ranks=1, seconds=0.0, findings=(finding,))


def test_a_case_that_has_ended_is_not_lost_with_its_round(begin: Callable[..., SmallerCases]) -> None:
    cases = begin(("a.py", True), ("a.py", True), None, ("a.py", True), KeyboardInterrupt())
    round_ = [
        {"recipe.steps": 1},
        {"recipe.data.batch": 4},
        {"recipe.data.seq_len": 1},
        {"layout.dp_shard": 1},
    ]
    with pytest.raises(KeyboardInterrupt):
        cases.shows(round_)
    values, found = cases.find_smallest()
    assert values == {"recipe.data.seq_len": 1}
    assert found.line.startswith("a.py")


def test_a_case_with_another_proved_line_is_not_kept(begin: Callable[..., SmallerCases]) -> None:
    cases = begin(("a.py", True), ("b.py", True), ("b.py", True))
    assert cases.shows([{"recipe.steps": 1}]) == [True]
    assert not cases.confirms({"recipe.steps": 1})
    assert cases.find_smallest()[0] == {}


def test_a_line_without_proof_may_change(begin: Callable[..., SmallerCases]) -> None:
    cases = begin(("a.py", False), ("b.py", False), ("b.py", False))
    assert cases.shows([{"recipe.steps": 1}]) == [True]
    assert cases.confirms({"recipe.steps": 1})
    assert cases.find_smallest()[0] == {"recipe.steps": 1}
