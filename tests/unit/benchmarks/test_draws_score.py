"""Scores of claims from data, and claims read from findings."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from moeverify.results.culprit import CodeLine, Culprit, Operation

claims: Any = import_module("claims")
loader: Any = import_module("loader")
score: Any = import_module("score")
run: Any = import_module("run")

TRUTH = loader.Truth(
    kind="reduction",
    says="The norms are not summed over tp.",
    tensors=("layers.*.norm*",),
    axes=("tp",),
    also=("scale",),
    lines=(loader.Line("mine/code.py", 10, 12),),
    counterparts=(loader.Line("mine/model.py", 5, 5),),
    files=("mine/code.py", "mine/model.py"),
)
RIGHT = {
    "kind": "reduction",
    "tensors": ("layers.0.norm.weight",),
    "axes": ("tp",),
    "is_location_only": False,
}


def make_claim(**changes: Any) -> Any:
    return claims.Claim(**(RIGHT | changes))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "right"),
        ({"kind": "scale"}, "right"),
        ({"kind": "edit"}, "wrong"),
        ({"axes": ("dp_shard",)}, "wrong"),
        ({"axes": ("dp_shard", "tp")}, "right"),
        ({"tensors": ("head.weight", "embed.weight", "layers.0.norm.weight")}, "wrong"),
        ({"kind": "edit", "lines": (("/x/mine/code.py", 11),)}, "right"),
        ({"lines": (("/x/mine/code.py", 40),)}, "wrong"),
        ({"lines": (("/torch/nn.py", 40),)}, "right"),
        ({"lines": (("mine/model.py", 5),)}, "right"),
        ({"lines": (("mine/model.py", 5), ("mine/model.py", 6))}, "wrong"),
        ({"kind": "edit", "lines": (("mine/model.py", 5),)}, "wrong"),
        ({"kind": "edit", "shown": (("code.py", 11),)}, "line"),
        ({"is_location_only": True}, "place"),
        ({"is_location_only": True, "tensors": ("head.weight",)}, "none"),
        ({"is_location_only": True, "tensors": ("head.weight",), "shown": (("code.py", 10),)}, "line"),
        ({"is_location_only": True, "lines": (("code.py", 10),)}, "right"),
    ],
)
def test_the_leading_claim_decides(changes: dict[str, Any], verdict: str) -> None:
    assert score.judge(TRUTH, [make_claim(**changes), make_claim()]) == verdict


def test_without_a_claim_there_is_none() -> None:
    assert score.judge(TRUTH, []) == "none"


def make_finding(**changes: Any) -> dict[str, Any]:
    operation = {"kind": "unreduced", "axes": [{"times": ["tp"], "over": []}], "num_replicas": 2}
    subject = {"quantity": "gradient", "tensors": ["layers.0.norm.weight"], "module": "", "inner": ""}
    explanation = {"cause": "missing-reduction", "subject": subject, "operation": operation}
    finding = {
        "check": "gradient",
        "tensor": "layers.0.norm.weight",
        "step": 0,
        "error": 1.0,
        "bound": 1e-10,
        "follows": "",
        "cause": "the gradient is not reduced over tp",
        "code": "missing-reduction",
        "explanation": explanation,
        "place": {"module": "layers.0.norm", "axes": ["tp"], "issued": [{"site": "code.py:11 in finish"}]},
    }
    return finding | changes


def read(*findings: dict[str, Any]) -> Any:
    return claims.read_claims({"case": {"findings": list(findings)}})


@pytest.mark.parametrize(
    ("changes", "is_location_only"),
    [
        ({}, False),
        ({"there": {"operator": "mul", "line": {"file": "mine/code.py", "line": 11}}}, True),
        ({"there": {"operator": "mul", "line": {"file": "mine/code.py", "line": 12}}}, False),
        ({"mechanism": "operand"}, True),
        ({"mechanism": "operand", "taken": {"label": "w"}}, False),
        ({"proved": False}, True),
    ],
)
def test_a_value_that_was_made_elsewhere_is_no_cause(changes: dict[str, Any], is_location_only: bool) -> None:
    here = Operation(operator="mul", line=CodeLine(file="mine/code.py", line=11), step=0)
    culprit = Culprit(mechanism="number", proved=True, here=here, leads=True).model_dump() | changes
    (claim,) = read(make_finding(culprit=culprit))
    assert claim.is_location_only is is_location_only


def test_a_finding_is_read_as_a_claim() -> None:
    (claim,) = read(make_finding())
    assert claim == make_claim()
    assert score.judge(TRUTH, [claim]) == "right"


def test_what_follows_from_another_is_no_claim_and_a_cause_leads() -> None:
    follower = make_finding(follows="x", error="Infinity")
    unknown = make_finding(explanation=None, code="", cause="", tensor="head.weight", step=0)
    later = make_finding(step=1, tensor="first.weight")
    found = read(unknown, follower, later, make_finding())
    assert [claim.kind for claim in found] == ["reduction", "", "reduction"]


def test_an_operation_has_its_lines() -> None:
    operation = {"kind": "unreduced", "site": "/x/mine/code.py:11 in add"}
    subject = {"quantity": "output", "tensors": [], "module": "layers.0.norm", "inner": ""}
    explanation = {"cause": "forward", "subject": subject, "operation": operation}
    (claim,) = read(make_finding(explanation=explanation, code="forward", place=None))
    assert (claim.kind, claim.lines) == ("reduction", (("/x/mine/code.py", 11),))
    assert claim.tensors == ("layers.0.norm",)
    assert not claim.is_location_only


@pytest.mark.parametrize(
    ("operation", "code", "kind", "is_location_only"),
    [
        ({"kind": "altered"}, "forward", "", True),
        ({"kind": "altered"}, "nondeterminism", "race", True),
        ({"kind": "replaced", "by": "tensor"}, "permutation", "elsewhere", False),
        ({"kind": "replaced", "by": "step-before"}, "stale", "state", False),
        ({"kind": "unmoved"}, "optimizer", "optimizer", False),
        ({"kind": "rounded"}, "rounding", "dtype", False),
        ({"kind": "zeroed", "absent": True}, "missing", "layout", False),
        ({"kind": "moved"}, "permutation", "elsewhere", False),
    ],
)
def test_kinds_of_operations(operation: dict[str, Any], code: str, kind: str, is_location_only: bool) -> None:
    explanation = make_finding()["explanation"] | {"operation": operation, "cause": code}
    (claim,) = read(make_finding(explanation=explanation, code=code))
    assert (claim.kind, claim.is_location_only) == (kind or claim.kind, is_location_only)


def make_share(value: float, **tokens: Any) -> dict[str, Any]:
    part = {"term": "", "tokens": {"data_rank": None, "micro_batch": None} | tokens}
    return {"kind": "scaled", "contributions": [{"part": part, "factor": {"value": value, "equals": []}}]}


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (make_share(0.0, data_rank=1), "reduction"),
        (make_share(0.0, micro_batch=1), "loop"),
        (make_share(0.0), "edit"),
    ],
)
def test_parts_of_a_sum(operation: dict[str, Any], kind: str) -> None:
    explanation = make_finding()["explanation"] | {"operation": operation}
    (claim,) = read(make_finding(explanation=explanation, code="share-weights"))
    assert (claim.kind, claim.is_location_only) == (kind, False)


def test_a_weight_without_a_name_is_a_measurement() -> None:
    explanation = make_finding()["explanation"] | {"operation": make_share(0.3, micro_batch=1)}
    (claim,) = read(make_finding(explanation=explanation, code="share-weights"))
    assert claim.is_location_only


def test_an_error_shows_the_lines_of_its_stack() -> None:
    report = {"rank": 0, "stack": 'File "/x/mine/code.py", line 11', "summary": "at mine/code.py:11 in step"}
    (claim,) = claims.read_claims({"case": {"findings": [], "reason": "", "rank_reports": [report]}})
    assert score.judge(TRUTH, [claim]) == "right"


def write_result(out: Path, plant: Any, verdict: str, findings: list[dict[str, Any]]) -> None:
    path = run.result_path(out, plant, "float64")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"verdict": verdict, "seconds": 1.0, "case": {"findings": findings}}))


def test_rows_totals_and_changes(tmp_path: Path) -> None:
    plants = [loader.Plant(id=name, stack="mine", case={}, truth=TRUTH) for name in ("p1", "p2", "p3")]
    write_result(tmp_path, plants[0], "mismatch", [make_finding()])
    write_result(tmp_path, plants[1], "pass", [])
    rows = score.score(tmp_path, plants, "float64")
    assert [(row.id, row.detected, row.verdict) for row in rows] == [
        ("p1", True, "right"),
        ("p2", False, "none"),
    ]
    assert score.make_totals(rows, lambda row: row.stack)[0] == [
        "mine",
        "2",
        "1",
        "1",
        "0",
        "0",
        "0",
        "1",
        "0",
        "50 %",
    ]
    old = [{"id": "p1", "precision": "float64", "verdict": "wrong", "detected": True}]
    assert [row[:3] for row in score.compare(rows, old)] == [["p1", "wrong", "right"], ["p2", "-", "missed"]]


@pytest.mark.parametrize(("distance", "is_near"), [(3, True), (4, False)])
def test_a_report_that_shows_a_line_within_three_is_near(distance: int, is_near: bool) -> None:
    line = TRUTH.lines[0]
    for number in (line.first - distance, line.last + distance):
        claim = claims.Claim(shown=((line.file, number),))
        assert score.is_near(TRUTH, [claim]) is is_near
    assert not score.is_near(TRUTH, [])


TEXT = """\
p1         2  1490 in 14        inf / exact  repeat: embed.weight    9.5  MISMATCH
p10        2  1490 in 14       1.32 / exact  replicas: norm          3.2  MISMATCH

p1  MISMATCH  2 ranks, 9.5 s  c3/p1.yaml
  recipe    kestrel

p10  MISMATCH  2 ranks, 3.2 s  c3/p10.yaml
  recipe    other

note      p1, p10: golden is not recorded
MISMATCH  2 cases
"""


def test_the_text_of_one_case_is_cut_out() -> None:
    said = run.cut_text(TEXT, "p1", ["p1", "p10"])
    assert "kestrel" in said
    assert "other" not in said
    assert "golden is not recorded" in said
    assert "2 cases" not in said


def test_cases_of_a_stopped_command_are_read(tmp_path: Path) -> None:
    keep, result = tmp_path / "a.keep", tmp_path / "a.json"
    kept = {"name": "p1 0123", "result": {"name": "p1", "verdict": "mismatch"}}
    keep.write_text(json.dumps({"environment": {}}) + "\n" + json.dumps(kept) + '\n{"name": "p2')
    result.write_text(json.dumps({"cases": [{"name": "p2", "verdict": "skipped"}]}))
    assert [case["name"] for case in run._read_cases(result, keep)] == ["p1"]


def test_cases_of_a_stack_share_commands() -> None:
    make = loader.Plant
    plants = [make(id=f"p{i}", stack="mine", case={"layout": {"tp": 2}}) for i in range(5)]
    plants += [make(id="f", stack="builtin", case={"layout": {"tp": 2}}, fault="a:b")]
    jobs = run.make_jobs(plants, "float64", workers=1, most=4)
    assert sorted(len(job.plants) for job in jobs) == [1, 1, 4]
