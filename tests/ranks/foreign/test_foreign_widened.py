"""Parts of a user's model that one device computes in float32: bounds and wider runs do not see a narrow one."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.cases.validation.load import load_cases
from moeverify.report.words.run import word_finding
from moeverify.results.checks import CheckName
from moeverify.results.run import CaseResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

STEP = "step: 'widened:step'"
CASES = {
    "average": ("bfloat16", ""),
    "narrow_softmax": ("bfloat16", ""),
    "stepped": ("bfloat16", STEP),
    "narrow_masters": ("bfloat16", STEP),
    "narrow_sums": ("bfloat16", STEP),
    "rounded": ("float64", ""),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    folder = tmp_path_factory.mktemp("widened")
    program = Path(__file__).parent / "programs" / "widened.py"
    (folder / program.name).write_text(program.read_text())
    for way, (precision, more) in CASES.items():
        (folder / f"{way}.yaml").write_text(
            f"recipe:\n  name: {precision}{'-own' if more else ''}\n"
            "  model: {factory: 'widened:Model', vocab_size: 32}\n"
            f"  data: {{batch: 4, seq_len: 8}}\n  precision: {precision}\n"
            f"  optimizer: {{name: sgd, lr: 0.1}}\n  {more}\n"
            f"layout: {{dp_replicate: 2, micro_batches: 2, parallelize: 'widened:{way}'}}\n"
        )
    options = RunOptions(device="cpu", golden_folder=folder / "golden", cache_folder=folder / "cache")
    run = run_cases(load_cases([folder]), options, lambda event: None)
    assert run is not None
    return {each.name: each for each in run.cases}


@pytest.mark.parametrize("way", ["average", "stepped"])
def test_what_one_device_widens_too_is_right(way: str, results: dict[str, CaseResult]) -> None:
    assert results[way].findings == ()


@pytest.mark.parametrize(
    ("way", "cause", "line"),
    [
        ("narrow_softmax", "softmax in attention computes in bfloat16", "scores.softmax(-1)"),
        ("narrow_masters", "foreach_add in step computes in bfloat16", "optimizer.step()"),
        ("narrow_sums", "zeros_like in Sums.add computes in bfloat16", "torch.zeros_like("),
    ],
)
def test_a_narrow_operator_is_named_with_its_line(
    way: str, cause: str, line: str, results: dict[str, CaseResult]
) -> None:
    [finding] = results[way].findings
    words = word_finding(finding)
    assert finding.check == CheckName.PRECISION
    assert words.cause == f"{cause}, and on one device in float32"
    source = (Path(__file__).parent / "programs" / "widened.py").read_text().splitlines()
    number = int(words.evidence[0].split(":")[1].split()[0])
    assert line in source[number - 1]


def test_weights_that_a_float64_pass_rounds_are_told(results: dict[str, CaseResult]) -> None:
    found = [each for each in results["rounded"].findings if each.check == CheckName.REBOUND]
    [first] = [each for each in found if not each.follows]
    assert len(found) == 5
    assert word_finding(first).cause == "embed.weight was rounded to float32 outside of the optimizer step"
