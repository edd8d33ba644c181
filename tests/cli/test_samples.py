"""Sample outputs in README and docs match this version, except for numbers, times and widths."""

from __future__ import annotations

import pytest
from forked.python import ForkedPython
from shown_samples import ROOT, SHOWN, assert_shown, leave_out_searched, run_quickly, samples

LONG = "verify"  # all cases: they run as tests of their own
ELSEWHERE = "own-models"  # `test_examples.py` looks at its results, too


def test_every_sample_is_shown_and_can_be_made() -> None:
    assert set(SHOWN) == set(samples.TABLES) | set(samples.OUTPUTS)


@pytest.mark.parametrize("name", samples.TABLES)
def test_tables_are_those_of_the_code(name: str) -> None:
    page, text = SHOWN[name]
    assert samples.TABLES[name]() == text, f"`make samples` writes {page.name} anew"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in samples.OUTPUTS if name not in (LONG, ELSEWHERE)])
def test_outputs_are_those_of_this_version(
    name: str, python: ForkedPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "PYTHON", python.command())
    monkeypatch.setattr(samples, "run", run_quickly)
    monkeypatch.setattr(samples, "EXPLAINED", leave_out_searched(samples.EXPLAINED))
    assert_shown(name, samples.OUTPUTS[name]())


@pytest.mark.parametrize("slow", ["1 min 44 s", "1 h 02 min", "7 min"])
def test_times_of_a_slow_machine_are_left_out(slow: str) -> None:
    line = "fsdp2-ep2  MISMATCH  4 ranks, {}  cases/fsdp2-ep2.yaml"
    assert samples.outline(line.format(slow)) == samples.outline(line.format("46.2 s"))


def test_the_long_output_has_the_rows_of_cases() -> None:
    _, text = SHOWN[LONG]
    rows = [line.split()[0] for line in text.splitlines()[3:-3]]
    cases = {path.stem for path in (ROOT / "cases").glob("*.yaml")}
    assert len(rows) >= 5
    assert set(rows) <= cases
    assert f"  {len(cases)} cases: " in text


def test_words_are_compared_and_numbers_are_not() -> None:
    before = "case   ranks\n------------\nep2        2   7.4e-14 / 1e-10  pass\nat [1, -2]: 0.5"
    assert samples.outline(before) == samples.outline(
        before.replace("7.4e-14", "1e-9").replace("----", "-----")
    )
    assert samples.outline(before) != samples.outline(before.replace("pass", "MISMATCH"))
    assert samples.outline(before) != samples.outline(before.replace("at", "rank"))


def test_the_worst_tensor_of_a_case_that_passes_is_not_compared() -> None:
    row = "my-gpt-tp  2  1725  1.4e-16 / 3.5e-16  {}  1.4  {}"
    for verdict, alike in (("pass", True), ("MISMATCH", False)):
        outlines = [
            samples.outline(row.format(name, verdict))
            for name in ("optimizer step: wte.weight.exp_avg", "gradient: wpe.weight")
        ]
        assert (outlines[0] == outlines[1]) is alike
        assert [outline[0].split()[-1] for outline in outlines] == [verdict] * 2
