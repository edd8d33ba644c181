"""Rules for the checks of a case: known names, reasons for declared differences, and effective numbers."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.rule import Rule, blame, reading
from moeverify.cases.schema import Case, Tolerance
from moeverify.cases.suggest import suggest
from moeverify.errors import Problem
from moeverify.results.checks import CheckName

_OF_LAYERS = (CheckName.FORCED_BLOCKS, CheckName.GRADIENT_SUM)


@reading("checks.skip", "checks.differs", "checks.also", "recipe.float8")
def known_checks(case: Case) -> Iterator[Problem]:
    """Require that skipped, declared and requested checks exist, and that requested ones are optional."""
    # The gradient sum runs by default only in float8.
    is_usual = case.recipe.float8 != "none"
    for field in ("skip", "differs", "also"):
        for name in getattr(case.checks, field):
            if name not in set(CheckName):
                yield blame(f"checks.{field}", f"there is no check `{name}`", suggest(name, CheckName))
    for name in set(CheckName).intersection(case.checks.also):
        if not CheckName(name).is_optional and (is_usual or name != CheckName.GRADIENT_SUM):
            yield blame("checks.also", f"`{name}` is checked in any case", "remove it")


@reading("checks.differs", "checks.because", "checks.skip")
def declared_differences(case: Case) -> Iterator[Problem]:
    """Require a reason for declared differences, and no skip of a declared check."""
    if bool(case.checks.differs) != bool(case.checks.because):
        yield blame("checks.differs", "`differs` and `because` go together", "say what differs, and why")
    for name in case.checks.differs:
        if name in case.checks.skip:
            yield blame("checks.differs", f"`{name}` cannot be both declared to differ and skipped")


@reading("checks.also", "recipe.model.factory", "recipe.step", "layout.parallelize")
def known_layers(case: Case) -> Iterator[Problem]:
    """Reject checks of layers for a user's model or layout, because their interfaces are unknown."""
    path = next(iter(case.recipe.functions), "layout.parallelize" if case.layout.parallelize else "")
    for name in _OF_LAYERS:
        if path and name in case.checks.also:
            message = f"`{name}` is for the reference model under layouts of its own"
            yield blame("checks.also", message, f"remove it, or {path}")


def _fixed_by(name: str) -> Rule:
    """Return the rule that a fixed tolerance, and no other, has the number `name`."""

    @reading(f"checks.tolerance.{name}", "checks.tolerance.kind")
    def rule(case: Case) -> Iterator[Problem]:
        tolerance = case.checks.tolerance
        is_given = getattr(tolerance, name) is not None
        if is_given and tolerance.kind != "fixed":
            message = f"`{name}` has no effect on the tolerance `{tolerance.kind}`"
            yield blame(f"checks.tolerance.{name}", message, "write `kind: fixed`, or remove it")
        elif tolerance.kind == "fixed" and not is_given:
            message = f"the tolerance `fixed` needs `{name}`"
            yield blame("checks.tolerance.kind", message, f"write `{name}: 0.0` or more")

    return rule


@reading("checks.tolerance.factor", "checks.tolerance.kind")
def tolerance_factor(case: Case) -> Iterator[Problem]:
    """Reject a factor without a calibrated tolerance, because it multiplies only measured noise."""
    tolerance = case.checks.tolerance
    if tolerance.kind != "calibrated" and tolerance.factor != Tolerance().factor:
        message = f"`factor` has no effect on the tolerance `{tolerance.kind}`"
        yield blame("checks.tolerance.factor", message, "write `kind: calibrated`, or remove it")


CHECK_RULES = (
    known_checks,
    declared_differences,
    known_layers,
    _fixed_by("rtol"),
    _fixed_by("atol"),
    tolerance_factor,
)
