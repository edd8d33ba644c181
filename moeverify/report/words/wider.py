"""What wider precisions have shown of a finding without a cause, in words."""

from __future__ import annotations

from moeverify.results.finding import Finding


def describe_wider(finding: Finding) -> tuple[str, ...]:
    """Return a line for each thing that wider precisions say of a finding."""
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
