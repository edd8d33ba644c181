"""Cases that can be judged by a golden of sketches. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.cases.schema import Case
from moeverify.errors import CaseError, Problem

_REMEDY = "use a golden of whole tensors, without --sketch"


def find_sketch_problems(case: Case) -> list[Problem]:
    """Return why the golden of a case cannot be computed layer by layer, or why sketches do not suffice."""
    recipe, found = case.recipe, {}
    if recipe.model.reference is None:
        found["recipe.model.factory"] = "a user's model cannot be computed layer by layer"
    if recipe.step is not None:
        found["recipe.step"] = "a user's step cannot be computed layer by layer"
    if recipe.reference != "float64" and recipe.precision == "float64":
        found["recipe.reference"] = "ranks in float64 are not compared with a golden in a narrower precision"
    if recipe.float8 != "none":
        found["recipe.float8"] = "float8 scales depend on the whole batch, and rows are computed one by one"
    if case.checks.steps == "forced" and recipe.steps > 1:
        found["checks.steps"] = "forced steps begin with the golden's weights, and sketches have no values"
    if case.checks.also:
        found["checks.also"] = f"a golden of sketches has no tensors of {', '.join(case.checks.also)}"
    return [Problem(text, file=case.file, path=path, remedy=_REMEDY) for path, text in found.items()]


def check_sketchable(cases: Sequence[Case]) -> None:
    """Check that goldens of sketches suffice for all cases.

    Raises: CaseError listing all problems of the cases.
    """
    problems = [problem for case in cases for problem in find_sketch_problems(case)]
    if problems:
        raise CaseError(problems)
