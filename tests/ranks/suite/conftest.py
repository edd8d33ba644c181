"""Many cases with one fault each, in one launch: starting ranks takes longer than a tiny case."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.validation.load import load_cases
from moeverify.report.words.run import word_case
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases


@pytest.fixture(scope="session")
def run_with_faults() -> Callable[[Any, Mapping[str, str]], dict[str, Any]]:
    """Return a function that runs all cases of a project and returns the JSON of each.

    Cases that are named get a fault of suite_faults.py.
    """

    def do(project: Any, faults: Mapping[str, str]) -> dict[str, Any]:
        cases = load_cases(sorted((project.folder / "cases").glob("*.yaml")))
        options = RunOptions(
            device="cpu",
            golden_folder=project.folder / "golden",
            cache_folder=project.shared,
            case_faults={name: f"suite_faults:{fault}" for name, fault in faults.items()},
            explain_seconds=0.0,  # these tests are about the checks
        )
        with pytest.MonkeyPatch.context() as patch:
            path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
            result = run_cases(cases, options, lambda event: None)
        assert result is not None
        return {case.name: word_case(case).model_dump(mode="json") for case in result.cases}

    return do
