"""Expected differences: a case may declare that its implementation differs from its golden.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.cases.schema import Checks, Precision
from moeverify.results.finding import CheckResult, Verdict
from moeverify.results.run import Declared


def apply_declared_differences(
    wanted: Checks, checks: Sequence[CheckResult], precision: Precision = "float64"
) -> tuple[Verdict, Declared | None]:
    """Return the verdict of a case and the state of its declaration.

    A case with a declaration passes if exactly the declared checks differ. Rounding may hide the difference from
    some of them: below float64 one is enough.
    """
    found = {check.name for check in checks if check.verdict == "mismatch"}
    if not wanted.differs:
        return ("mismatch" if found else "pass"), None
    has_enough = precision != "float64" and bool(found.intersection(wanted.differs))
    declared = Declared(
        names=wanted.differs,
        equal=() if has_enough else tuple(name for name in wanted.differs if name not in found),
        has_more=bool(found - set(wanted.differs)),
        because=wanted.because,
    )
    return ("mismatch" if declared.equal or declared.has_more else "pass"), declared
