"""The layouts that `moeverify init` tries for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from moeverify.cases.schema import Case
from moeverify.results.cause import Cause
from moeverify.results.factory import TriedModel
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller import init
from moeverify.verification.controller.init import list_candidates

GIVEN = {"title": "Net", "factory": "net:Net", "vocab_size": 8, "parameters": (8, 8), "seconds": 0.1}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["ddp", "fsdp2"]),
        ({"framework": "lightning"}, ["ddp", "fsdp2", "fabric-ddp", "fabric-fsdp2"]),
        ({"framework": "transformers"}, ["ddp", "fsdp2", "tp", "fsdp", "tp-ep"]),
        (
            {"parallelize": "net:parallelize", "expert_degrees": ("ep_size",)},
            ["ddp", "fsdp2", "own-dp-replicate", "own-dp-shard", "own-tp", "own-cp", "own-ep-size"],
        ),
    ],
)
def test_layouts_follow_from_the_framework_and_the_own_function(
    fields: dict[str, object], names: list[str]
) -> None:
    model = TriedModel.model_validate({**GIVEN, **fields})
    assert [each.name for each in list_candidates(model)] == names


def test_a_layout_that_does_not_apply_is_shown_as_skipped_and_a_wrong_one_as_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pretend(cases: Sequence[Case], _: object, on_event: init.OnEvent) -> RunResult:
        results = []
        for case in cases:
            code = Cause.LAYOUT if case.name == "net-ddp" else Cause.SCALE
            finding = Finding(check="gradient", tensor="w", rank=0, step=0, error=1.0, bound=0.0, code=code)
            results.append(
                CaseResult(
                    name=case.name, file="", verdict="mismatch", ranks=2, seconds=0.1, findings=(finding,)
                )
            )
            on_event(Event(kind="case-end", case=case.name, result=results[-1]))
        return RunResult(verdict="mismatch", environment={}, cases=tuple(results))

    monkeypatch.setattr(init, "run_cases", pretend)
    model, shown = TriedModel.model_validate(GIVEN), []
    tried, _ = init.try_layouts(model, tmp_path, "verify", list_candidates(model), shown.append)
    assert {event.case: event.result and event.result.verdict for event in shown} == {
        "net-ddp": "skipped",
        "net-fsdp2": "mismatch",
    }
    assert {each.candidate.name: bool(each.obstacle) for each in tried} == {"ddp": True, "fsdp2": False}
