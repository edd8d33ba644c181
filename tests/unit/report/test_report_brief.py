"""The short JSON: less than 4 kB for any run, its commands whole, and its schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moeverify.report.brief import format_brief, list_lines
from moeverify.report.explanation import number_findings
from moeverify.report.faults import write_json as write_faults
from moeverify.report.formats.json import format_json
from moeverify.report.mutation import write_json as write_mutants
from moeverify.report.next_steps import Kept
from moeverify.report.results_schema import make_results_schema
from moeverify.results.brief import MOST_BYTES
from moeverify.results.culprit import CodeLine, Culprit, Operation, Origin, SourceValue
from moeverify.results.failure import EndKind, RankEnd
from moeverify.results.finding import Finding
from moeverify.results.run import SCHEMA_VERSION, CaseResult, RankReport, RunResult


def make_run(num_cases: int, num_findings: int, length: int) -> RunResult:
    here = Operation(operator="aten.mm", line=CodeLine(file="model.py", line=7, expression="x @ w"))
    there = Operation(
        operator="aten.mm", line=CodeLine(file="model.py", line=9, expression="x @ w.T" * length)
    )
    culprit = Culprit(mechanism="operator", proved=True, here=here, there=there, ranks=(0, 1), leads=True)
    findings = [
        Finding(
            check="gradient",
            tensor=f"layers.{number}." + "w" * length,
            step=0,
            rank=1,
            ranks=tuple(range(64)),
            error=1.0,
            bound=float("inf"),
            evidence=("seen " * length,) * 9,
            code="forward",
            culprit=culprit if number == 0 else None,
            follows="" if number < 5 else "layers.0",
        )
        for number in range(num_findings)
    ]
    cases = [
        CaseResult.model_validate(
            {"name": f"case-{number}", "file": f"cases/{number}.yaml", "verdict": "mismatch", "ranks": 2}
            | {"seconds": 1.0, "findings": findings}
        )
        for number in range(num_cases)
    ]
    passed = CaseResult(name="right", file="cases/right.yaml", verdict="pass", ranks=2, seconds=1.0)
    return RunResult(
        verdict="mismatch", environment={}, cases=(passed, *cases), command="moeverify run cases"
    )


def read(run: RunResult, kept: Kept | None = None, **rest: Any) -> dict[str, Any]:
    text = format_brief(run, kept or Kept(Path("runs/1")), **rest)
    assert len(text.encode()) < MOST_BYTES
    content: dict[str, Any] = json.loads(text)
    assert content["schema_version"] == SCHEMA_VERSION
    return content


def test_a_run_of_any_size_fits() -> None:
    for num_cases, num_findings, length in ((1, 1, 5), (3, 8, 40), (100, 30, 300), (1, 1, 900)):
        told = read(make_run(num_cases, num_findings, length))
        assert told["counts"] == {"pass": 1, "mismatch": num_cases}
        assert len(told["cases"]) + told.get("omitted", 0) == num_cases
        first = told["cases"][0]
        assert len(first["findings"]) + first.get("omitted", 0) == num_findings
        assert first["findings"][0]["lines"][0] == "model.py:7: x @ w"
        assert first["findings"][0]["proved"] is True
        assert told["next"][0]["command"] == "moeverify explain runs/1 1"


def test_lines_lead_from_the_operation_to_the_producer_of_its_operand_and_to_its_origins() -> None:
    def at(number: int) -> CodeLine:
        return CodeLine(file="net/a.py", line=number)

    def make(number: int) -> Operation:
        return Operation(operator="mm", line=at(number), callers=(at(number + 50),))

    culprit = Culprit(
        mechanism="operand",
        proved=True,
        here=make(1),
        made=make(2),
        there=make(3),
        taken=SourceValue(label="w"),
        moves=(make(4),),
        between=(make(5),),
        origins=(Origin(kind="definition", line=at(7)), Origin(kind="missing", line=at(8), caller=at(9))),
        ranks=(0,),
    )
    assert [line.split(": ")[0] for line in list_lines(culprit)] == [
        f"net/a.py:{number}" for number in (1, 2, 3, 4, 7, 8, 9, 5)
    ]
    assert list_lines(culprit)[0] == "net/a.py:1"
    assert list_lines(culprit)[4] == "net/a.py:7:  (defines a value that the operation takes)"
    assert list_lines(culprit)[6] == "net/a.py:9:  (calls that function)"
    wrong_input = culprit.model_copy(update={"there": make(1)})
    assert list_lines(wrong_input)[0] == "net/a.py:2"
    assert list_lines(wrong_input)[1:3] == ["net/a.py:1:  (takes it)", "net/a.py:4:  (moves its operand)"]


def test_one_finding_can_be_asked_for() -> None:
    run = make_run(2, 3, 5)
    item = number_findings(run)[4]
    told = read(run, only=item)
    assert [each["name"] for each in told["cases"]] == ["case-1"]
    assert [each["number"] for each in told["cases"][0]["findings"]] == [5]
    assert told["next"][0]["command"] == "moeverify explain runs/1 5"


def test_a_case_without_a_verdict_has_its_reason() -> None:
    report = RankReport.of(
        0,
        RankEnd(how=EndKind.RAISED, error="ValueError: no"),
        summary="ValueError: no",
        stack="  File x\nValueError: no",
    )
    case = CaseResult(name="a", file="a.yaml", verdict="error", ranks=2, seconds=0.0, rank_reports=(report,))
    told = read(RunResult(verdict="error", environment={}, cases=(case,)), Kept())
    assert told["cases"][0]["reason"] == "ValueError: no"


def test_the_schema_describes_the_keys_of_a_run_and_of_the_short_form() -> None:
    schema = make_results_schema()
    definitions = schema["$defs"]
    run = json.loads(make_run(1, 1, 5).model_dump_json())
    told = read(make_run(1, 1, 5))
    for name, content in (("RunResult", run), ("Brief", told), ("CaseResult", run["cases"][0])):
        assert {f"#/$defs/{name}"} & {each.get("$ref") for each in schema["anyOf"]} or name == "CaseResult"
        assert set(content) <= set(definitions[name]["properties"])
    assert definitions["CheckResult"]["properties"]["blind"]  # the name in JSON
    bound = run["cases"][1]["findings"][0]["bound"]
    assert bound in definitions["Finding"]["properties"]["bound"]["anyOf"][1]["enum"]


def test_the_schema_has_the_files_of_every_command() -> None:
    schema = make_results_schema()
    definitions = schema["$defs"]
    written = json.loads(format_json(make_run(1, 1, 5)))
    assert set(written) <= set(definitions["RunResult"]["properties"])
    named = {each["$ref"].rpartition("/")[2] for each in schema["anyOf"] if "$ref" in each}
    assert {"RunResult", "Bisection", "BenchRun", "CollectiveRun", "Diagnostics", "OperatorTable"} <= named
    rows = {
        "FaultRow": json.loads(write_faults([], {}, "x")),
        "MutantRow": json.loads(write_mutants([], {}, "x")),
    }
    for row, content in rows.items():
        (found,) = (each for each in schema["anyOf"] if set(each.get("properties", ())) == set(content))
        assert "finding" not in definitions[row]["properties"]
        assert definitions[row]["additionalProperties"] is False
        assert row in str(found)
