"""Words for the results of reruns in wider precisions."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult


def describe_wider(finding: Finding) -> tuple[str, ...]:
    """Return one line per distinct result in wider precisions."""
    if any(each.outcome == "found" for each in finding.wider):
        precision = finding.wider[0].precision
        return (f"found in {precision}: in the case's own precision it is below the effect of rounding",)
    if finding.is_of_wider_run:
        return (f"found in {finding.wider[0].precision}, where rounding hides less",)
    by_outcome: dict[tuple[str, str], list[str]] = {}
    for each in finding.wider:
        by_outcome.setdefault((each.outcome, each.reason), []).append(each.precision)
    lines = []
    for (outcome, reason), precisions in by_outcome.items():
        names = " and ".join(precisions)
        lines.append(
            {
                "named": f"in {names} it has a cause",
                "alike": f"in {names} it differs too, and no more of the cause is seen",
                "unexplained": f"in {names} it differs too, and no hypothesis explains it",
                "not-shown": f"in {names} nothing differs: it is a matter of precision",
                "not-run": f"{names} did not run: {reason}",
            }[outcome]
        )
    return tuple(lines)


def describe_confirmation(precision: str, answer: CaseResult) -> str:
    """Return the result of rerunning a passing case in a wider precision."""
    if answer.verdict == "pass":
        return f"in {precision} it passes, too"
    if answer.verdict == "undecided":
        return f"in {precision} it is undecided: {answer.reason}"
    if answer.verdict == "mismatch":
        return f"it passes in its own precision: all that is shown is of the run in {precision}"
    return f"it did not run in {precision}, which would see more: {answer.reason}"


def describe_decision(precision: str, case: CaseResult) -> str:
    """Return that a wider precision decided a case, and how much the case's own precision decided."""
    return f"decided in {precision}, where it passes; in its own precision {case.reason}"


def describe_narrow_layout(precision: str) -> str:
    """Return that the wider run of a layout that fixes a narrower dtype in its code decides nothing."""
    return f"its run in {precision} decides nothing: `parallelize` narrows tensors there too, by a dtype in its code"


def describe_own_dtypes(precision: str) -> str:
    """Return that user code differs in a wider precision too, perhaps due to a dtype fixed in it."""
    return f"in {precision} it differs before the optimizer's step too, as code that keeps a dtype of its own may"


def describe_unconfirmed(precision: str) -> str:
    """Return a note that the confirming run in a wider precision was cut off."""
    return f"its run in {precision}, which would see more, was cut off"


def describe_unasked(precisions: Sequence[str]) -> str:
    """Return a note that the reruns of an unexplained finding in wider precisions were cut off."""
    runs, were = ("runs", "were") if len(precisions) > 1 else ("run", "was")
    return f"its {runs} in {' and '.join(precisions)}, where more may be seen of the cause, {were} cut off"


def describe_left_out(precisions: Sequence[str]) -> str:
    """Return a note that ranks of an external launcher cannot be rerun in wider precisions."""
    names = " and ".join(precisions)
    return f"not asked in {names}, where more may be seen: without torchrun or srun the same command does"


def describe_num_unasked(count: int) -> str:
    """Return how many faults were not rerun in wider precisions because the command ended early."""
    faults = "1 fault has" if count == 1 else f"{count} faults have"
    return f"{faults} not been looked at in wider precisions, where more may be detected and named"
