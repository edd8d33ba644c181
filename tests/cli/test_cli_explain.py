"""`moeverify explain`: the list of origins, one finding with its evidence, one that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeverify.report.formats.registry import write_run
from moeverify.results.finding import Finding, Place, Trial
from moeverify.results.run import CaseResult, RunResult

TRIALS = (
    Trial(name="absent or zero", verdict="no", words="the largest value is 2, 1 expected"),
    Trial(
        name="a factor for each loss term",
        verdict="yes",
        words="1e-15 of the error is left",
        coefficients={"lm": 1.0, "balance": 0.5},
        residual=1e-15,
    ),
    Trial(name="rounding", verdict="untried", words="there is nothing to round"),
)


def make_finding(tensor: str, step: int = 0, **fields: Any) -> Finding:
    content = {"check": "gradient", "tensor": tensor, "step": step, "rank": 1, "error": 1.0, "bound": 1e-10}
    return Finding.model_validate(content | fields)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    place = Place(
        module="layers.1.moe", ranks=(0, 1), axes=("efsdp", "ep"), collectives=("all_reduce over tp",)
    )
    first = [
        make_finding("layers.1.moe.experts.up", cause="2 times", trials=TRIALS, place=place),
        make_finding("layers.0.q_proj.weight", step=1, follows="layers.1.moe.experts.up"),
    ]
    second = [make_finding("embed.weight"), make_finding("layers.1.moe.router.weight")]
    cases = tuple(
        CaseResult.model_validate(
            {"name": name, "file": f"cases/{name}.yaml", "verdict": "mismatch", "ranks": 2, "seconds": 1.0}
            | {"findings": findings}
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
def test_one_finding_tells_every_test(invoke: Any, run: Path, words: tuple[str, ...]) -> None:
    told = invoke("explain", run / "result.json", *words)
    assert told.exit_code == 0, told.stderr
    for part in (
        "finding 1 of 3, a: gradient: layers.1.moe.experts.up, step 0",
        "cause     2 times",
        "module    layers.1.moe",
        "axes      efsdp, ep",
        "issued    all_reduce over tp",
        "no        absent or zero: the largest value is 2, 1 expected",
        "yes       a factor for each loss term: 1e-15 of the error is left",
        "balance: 0.5000000000",
        "-         rounding: there is nothing to round",
    ):
        assert part in told.stdout


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
