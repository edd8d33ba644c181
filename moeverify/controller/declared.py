"""Differences that a case declares: where an implementation means something else than its golden. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.case.schema import Checks
from moeverify.results.finding import CheckResult, Verdict


def settle(wanted: Checks, checks: Sequence[CheckResult]) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict of a case and what there is to note: it passes if exactly what it declares differs."""
    found = {check.name for check in checks if check.verdict == "mismatch"}
    declared = set(wanted.differs)
    if not declared:
        return ("mismatch" if found else "pass"), ()
    equal = [name for name in wanted.differs if name not in found]
    if equal:
        return "mismatch", (f"declared to differ in {', '.join(equal)}, and does not",)
    if found - declared:
        return "mismatch", (f"differs as declared in {', '.join(wanted.differs)}, and in more",)
    return "pass", (f"differs in {', '.join(wanted.differs)}, as declared: {wanted.because}",)
