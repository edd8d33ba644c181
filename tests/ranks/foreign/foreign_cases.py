"""Verification of case files in this process, and their outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from moeverify.cases.validation.load import load_cases
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult, Event
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

EXAMPLES = Path(__file__).parents[3] / "examples"


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Outcomes of cases, by name."""

    results: Mapping[str, CaseResult]
    num_launches: int

    def find(self, case: str, check: str, step: int = 0) -> dict[str, Finding]:
        """Return the findings of one check at one step, by tensor."""
        findings = self.results[case].findings
        return {
            finding.tensor: finding for finding in findings if (finding.check, finding.step) == (check, step)
        }


def run_files(
    files: Sequence[Path], folder: Path, *overrides: str, explain_seconds: float = 60.0
) -> Outcomes:
    """Verify these case files, with goldens and cache in a folder, and return the outcome of each case."""
    cases = load_cases(files, overrides=overrides)
    options = RunOptions(
        device="cpu",
        golden_folder=folder / "golden",
        cache_folder=folder / "cache",
        explain_seconds=explain_seconds,
    )
    result = run_cases(cases, options, _ignore)
    assert result is not None
    return Outcomes({case.name: case for case in result.cases}, result.launches)


def _ignore(event: Event) -> None:
    pass
