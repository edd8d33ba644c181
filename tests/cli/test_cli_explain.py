"""`moeverify explain`: the list of origins, one finding with its evidence, and an unknown finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeverify.report.formats.registry import write_run
from moeverify.report.words.cause import describe_explanation
from moeverify.report.words.run import describe_collective
from moeverify.results.cause import Cause
from moeverify.results.collective import IssuedCollective
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor
from moeverify.results.finding import Finding
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part
from moeverify.results.place import Place
from moeverify.results.run import SCHEMA_VERSION, CaseResult, RunResult

EXPLANATION = Explanation(
    cause=Cause.TERM_SCALE,
    subject=Subject(quantity=Quantity.GRADIENT, tensors=("layers.1.moe.experts.up",)),
    operation=Scaled(contributions=(Contribution(part=Part(term="balance"), factor=Factor(value=0.5)),)),
    residual=1e-15,
)


ISSUED: Any = {"direction": "backward", "op": "all_reduce", "axis": "tp", "group": (0, 1)}

BOUNDS: Any = [
    {
        "check": "gradient",
        "tensor": "layers.0.norm.weight",
        "step": 1,
        "error": 0.03,
        "factor": 8.0,
        "parts": {"measured": 0.2, "typical": 0.4, "floor": 0.0078125},
        "run": "moved weights",
        "plain": 0.01,
    },
    {
        "check": "update",
        "tensor": "layers.0.norm.weight",
        "step": 0,
        "error": 0.0,
        "parts": {"sign flips": 0.1},
    },
]


def make_finding(tensor: str, step: int = 0, **fields: Any) -> Finding:
    content = {"check": "gradient", "tensor": tensor, "step": step, "rank": 1, "error": 1.0, "bound": 1e-10}
    return Finding.model_validate(content | fields)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    issued = IssuedCollective(**ISSUED)
    place = Place(
        module="layers.1.moe",
        ranks=(0, 1),
        axes=("efsdp", "ep", "micro-batches"),
        issued=(issued,),
        issued_in="layers.1.moe",
    )
    explained = {"explanation": EXPLANATION, "code": "term-scale", "place": place}
    first = [
        make_finding("layers.1.moe.experts.up", **explained),
        make_finding("layers.0.q_proj.weight", step=1, follows="layers.1.moe.experts.up"),
    ]
    second = [make_finding("embed.weight"), make_finding("layers.1.moe.router.weight")]
    cases = tuple(
        CaseResult.model_validate(
            {"name": name, "file": f"cases/{name}.yaml", "verdict": "mismatch", "ranks": 2, "seconds": 1.0}
            | {"findings": findings, "bounds": BOUNDS, "choices": {"num_held": 5}}
        )
        for name, findings in (("a", first), ("b", second))
    )
    write_run(
        "json", RunResult(verdict="mismatch", environment={}, cases=cases), tmp_path / "kept" / "result.json"
    )
    return tmp_path / "kept"


def test_origins_of_all_cases_are_numbered(invoke: Any, run: Path) -> None:
    told = invoke("explain", run)
    assert told.exit_code == 0
    lines = [line for line in told.stdout.splitlines() if line.startswith("  ")]
    assert [line[2:].split(":")[0] for line in lines if line[2].isdigit()] == [
        "1  gradient",
        "2  gradient",
        "3  gradient",
    ]
    assert "q_proj" not in told.stdout
    assert f"moeverify explain {run} 1" in told.stdout


@pytest.mark.parametrize("words", [("1",), ("experts.up",), ("gradient:", "moe.experts")])
def test_one_finding_tells_its_cause_and_place(invoke: Any, run: Path, words: tuple[str, ...]) -> None:
    told = invoke("explain", run / "result.json", *words)
    assert told.exit_code == 0, told.stderr
    for part in (
        "finding 1 of 3, a: gradient: layers.1.moe.experts.up, step 0",
        f"cause     {describe_explanation(EXPLANATION)}",
        "module    layers.1.moe",
        "axes      efsdp, ep",
        "counts    number of micro-batches",
        f"issued    {describe_collective(IssuedCollective(**ISSUED))}",
    ):
        assert part in told.stdout


@pytest.mark.parametrize(
    ("words", "numbers"), [(("explain",), [1, 2, 3]), (("explain", "2"), [2]), (("report",), [1, 2, 3])]
)
def test_the_short_json_is_all_of_standard_output(
    invoke: Any, run: Path, words: tuple[str, ...], numbers: list[int]
) -> None:
    told = invoke(words[0], run, *words[1:], "--json-brief")
    assert told.exit_code == 0, told.stderr
    brief = json.loads(told.stdout)
    assert [finding["number"] for case in brief["cases"] for finding in case["findings"]] == numbers
    assert brief["next"][0]["command"] == f"moeverify explain {run} {numbers[0]}"


def test_a_bound_tells_its_sources_with_their_shares_the_widest_first(invoke: Any, run: Path) -> None:
    told = invoke("explain", run, "--bound", "norm gradient")
    assert told.exit_code == 0, told.stderr
    lines = [line.strip() for line in told.stdout.splitlines()]
    first = lines.index("a: gradient: layers.0.norm.weight")
    assert lines[first + 1] == "bound     0.4 in step 1, the largest of these; the error is 0.03"
    shares = [line.split()[:2] for line in lines[first + 2 : first + 7] if "%" in line]
    assert shares == [["100", "%"], ["50", "%"], ["2", "%"]]
    assert "8 x the median of that error" in lines[first + 2]
    assert "largest in the run with initial weights off by one unit" in lines[first + 4]
    assert lines[first + 5].startswith("0.01 in the plain run")
    assert "update" not in told.stdout
    assert "a: no flip of routing is in measured errors: 5 choices near a tie" in told.stdout
    unknown = invoke("explain", run, "--bound", "embed")
    assert unknown.exit_code == 2
    assert "`gradient: layers.0.norm.weight`" in unknown.stderr


OLD = """{"schema_version": 1, "verdict": "mismatch", "environment": {}, "cases": [
  {"name": "a", "file": "cases/a.yaml", "verdict": "mismatch", "ranks": 2, "seconds": 1.0,
   "checks": [{"name": "gradient", "verdict": "mismatch", "tensors": 3}],
   "findings": [
    {"check": "gradient", "tensor": "w", "step": 0, "rank": 1, "error": 1.0, "bound": 1e-10,
     "cause": "every value is 2 = tp times the right one", "code": "scale", "where": "axis tp",
     "evidence": ["golden: 2"],
     "place": {"module": "layers.0", "ranks": [0, 1], "axes": ["tp"], "collectives": ["all_reduce over tp"]},
     "trials": [{"name": "one factor", "verdict": "yes", "words": "1e-15 of the error is left",
                 "coefficients": {"golden": 2.0}, "residual": 1e-15}],
     "follow_up": {"axes": ["tp", "cp"], "layout": {"tp": 4}, "answer": "axis tp: followed up"}}]}]}
"""


def test_a_run_of_version_1_is_explained_in_its_own_words(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(OLD)
    told = invoke("explain", tmp_path / "old.json", "1")
    assert told.exit_code == 0, told.stderr
    for part in (
        "cause     every value is 2 = tp times the right one",
        "where     axis tp",
        "evidence  golden: 2",
        "follow-up axis tp: followed up",
        "issued    all_reduce over tp",
    ):
        assert part in told.stdout


def test_a_run_of_version_1_is_reported_compared_and_written_anew(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(OLD)
    new = tmp_path / "new.json"
    told = invoke("report", tmp_path / "old.json", "--json", new, "--html", tmp_path / "old.html")
    assert told.exit_code == 0, told.stderr
    assert "every value is 2 = tp times the right one" in told.stdout
    before, after = json.loads(OLD), json.loads(new.read_text())
    assert after["schema_version"] == SCHEMA_VERSION
    (old,), (found,) = before["cases"][0]["findings"], after["cases"][0]["findings"]
    for key in ("cause", "code", "where", "evidence"):
        assert found[key] == old[key]
    assert "trials" not in found
    assert found["follow_up"]["answer"] == old["follow_up"]["answer"]
    assert invoke("diff", tmp_path / "old.json", new).stdout.startswith("same verdicts")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("9",), "there is no finding 9\n    they are 1 to 3"),
        (
            ("moe",),
            "2 findings match `moe`\n    give a number: 1 is gradient: layers.1.moe.experts.up, step 0; 3 is",
        ),
        (("q_proj",), "follows from layers.1.moe.experts.up: ask for that one"),
        (("embd.weight",), "did you mean 2, gradient: embed.weight, step 0?"),
    ],
)
def test_a_finding_that_is_not_there(invoke: Any, run: Path, words: tuple[str, ...], text: str) -> None:
    told = invoke("explain", run, *words)
    assert told.exit_code == 2
    assert text in told.stderr


def test_a_run_without_findings_has_nothing_to_explain(invoke: Any, keep: Any) -> None:
    told = invoke("explain", keep("a"))
    assert (told.exit_code, told.stdout) == (0, "nothing differs: there is no finding to explain\n")


def test_what_is_no_run_is_usage(invoke: Any, tmp_path: Path) -> None:
    assert invoke("explain", tmp_path / "nothing").exit_code == 2
