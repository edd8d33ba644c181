"""A row for each check of each case, in full precision; special characters in names stay in their cell."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

from moeverify.report.formats.csv import COLUMNS, format_csv
from moeverify.results.finding import CheckResult, Worst

WORST = Worst(tensor='layers.0."odd", name', error=0.1 + 0.2, bound=1e-10, step=1)


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_check_is_a_row_and_a_case_without_checks_too(
    make_run: Any, make_case: Any, make_finding: Any
) -> None:
    checks = (
        CheckResult(name="loss", verdict="pass", tensors=3),
        CheckResult(name="gradient", verdict="mismatch", tensors=7, worst=WORST, inconclusive=2),
    )
    findings = [make_finding(check="gradient", cause="too large", tensor=name) for name in ("a", "b")]
    differs = make_case("a", "mismatch", findings=findings).model_copy(update={"checks": checks})
    skipped = make_case("b", "skipped").model_copy(update={"reason": "needs 16 ranks", "checks": ()})
    loss, gradient, other = read(format_csv(make_run(differs, skipped)))
    assert tuple(loss) == COLUMNS
    assert (loss["check"], loss["check_verdict"], loss["worst_tensor"], loss["findings"]) == (
        "loss",
        "pass",
        "",
        "0",
    )
    assert (gradient["verdict"], gradient["check"], gradient["tensors"]) == ("mismatch", "gradient", "7")
    assert (gradient["inconclusive"], gradient["findings"], gradient["cause"]) == ("2", "2", "too large")
    assert gradient["worst_tensor"] == WORST.tensor
    assert float(gradient["error"]) == WORST.error
    assert (other["case"], other["check"], other["reason"]) == ("b", "", "needs 16 ranks")


def test_errors_that_are_no_numbers_can_be_read_again(make_run: Any, make_case: Any) -> None:
    worst = WORST.model_copy(update={"error": math.nan})
    check = CheckResult(name="update", verdict="mismatch", tensors=1, worst=worst)
    (row,) = read(format_csv(make_run(make_case("a", "mismatch").model_copy(update={"checks": (check,)}))))
    assert math.isnan(float(row["error"]))
