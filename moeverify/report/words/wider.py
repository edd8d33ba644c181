"""What wider precisions have shown of a finding without a cause, in words."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult


def describe_wider(finding: Finding) -> tuple[str, ...]:
    """Return a line for each thing that wider precisions say of a finding."""
    if any(each.outcome == "found" for each in finding.wider):
        precision = finding.wider[0].precision
        return (f"found in {precision}: in the case's own precision it is less than what rounding may do",)
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
    """Return what came of a case that passes, where it ran in a wider precision."""
    if answer.verdict == "pass":
        return f"in {precision} it passes, too"
    if answer.verdict == "mismatch":
        return f"it passes in its own precision: all that is shown is of the run in {precision}"
    return f"it did not run in {precision}, which would see more: {answer.reason}"


def describe_own_dtypes(precision: str) -> str:
    """Return that a user's own code differs in a wider precision by what it may have rounded by right."""
    return f"in {precision} it differs before the optimizer's step too, as code that keeps a dtype of its own may"


def describe_unconfirmed(precision: str) -> str:
    """Return what a pass lacks where a command ends before the run in a wider precision does."""
    return f"its run in {precision}, which would see more, was cut off"


def describe_unasked(precisions: Sequence[str]) -> str:
    """Return what a finding without a cause lacks where a command ends before its runs in wider precisions do."""
    runs, were = ("runs", "were") if len(precisions) > 1 else ("run", "was")
    return f"its {runs} in {' and '.join(precisions)}, where more may be seen of the cause, {were} cut off"


def describe_left_out(precisions: Sequence[str]) -> str:
    """Return what ranks of another launcher leave out, which run what they were started for and nothing more."""
    names = " and ".join(precisions)
    return f"not asked in {names}, where more may be seen: without torchrun or srun the same command does"


def describe_num_unasked(count: int) -> str:
    """Return that so many faults of a table that ends early have not been looked at in wider precisions."""
    faults = "1 fault has" if count == 1 else f"{count} faults have"
    return f"{faults} not been looked at in wider precisions, where more may be detected and named"
