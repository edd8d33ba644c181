"""All rules across fields, applied to a case; and the rules of checks, sizes and the precision `mixed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moeverify.cases.axes.rules import AXIS_RULES
from moeverify.cases.choice import report_missing
from moeverify.cases.rule import Rule, blame, reading, reference_model
from moeverify.cases.schema import Case, Tolerance
from moeverify.cases.size import MOST_STEPS, MOST_TOKENS, MOST_WORDS, describe_excess
from moeverify.cases.suggest import suggest
from moeverify.cases.validation.choices import CHOICE_RULES, CHOICES, list_chosen
from moeverify.cases.validation.recipe import RECIPE_RULES
from moeverify.errors import Problem
from moeverify.parallel.data_parallel import DATA_PARALLEL
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
        yield blame(
            "checks.differs",
            "`differs` and `because` go together",
            "name the differing checks, and the reason",
        )
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


@reading(
    *(f"layout.{name}" for name in ("data_parallel", "dp_replicate", "dp_shard", "cp", "pp", "parallelize")),
    "recipe.precision",
)
def mixed_precision(case: Case) -> Iterator[Problem]:
    """Require FSDP2 or a user's function for `mixed`, and no pipeline parallelism.

    Only these can use one dtype for the arithmetic and another for the parameters.
    """
    layout, path = case.layout, "recipe.precision"
    if case.recipe.precision != "mixed":
        return
    if layout.parallelize is None and not DATA_PARALLEL.find(layout.data_parallel).takes_mixed_precision:
        message = f"mixed is a precision of fsdp2, and {layout.data_parallel} is another data parallelism"
        yield blame(path, message, "write `data_parallel: fsdp2`, or the precision float32 or bfloat16")
    elif layout.parallelize is None and layout.data_ranks * layout.cp == 1:
        message = "mixed is a precision of fsdp2, which needs more than one rank"
        yield blame(path, message, "set layout.dp_shard, or write the precision float32 or bfloat16")
    if layout.pp > 1:
        yield blame(path, "mixed together with pp is not supported", "write float32 or bfloat16")


@reading("layout.in_float32", "layout.parallelize", "recipe.precision")
def wide_modules(case: Case) -> Iterator[Problem]:
    """Require a user's function and the precision `mixed` for `layout.in_float32`."""
    path = "layout.in_float32"
    if not case.layout.in_float32:
        return
    if case.recipe.precision != "mixed":
        yield blame(path, f"in_float32 has no effect on the precision {case.recipe.precision}", "remove it")
    elif case.layout.parallelize is None:
        message = "no module of a built-in layout is left in float32"
        yield blame(path, message, "remove it, or divide the model by `parallelize`")


PRECISION_RULES = (mixed_precision, wide_modules)


_REMEDY = "write sizes of a model that one device can train: a verification needs no larger ones"


@reading("recipe.model")
def size_of_model(case: Case) -> Iterator[Problem]:
    """Reject models that are too large, because one device trains the whole model in float64."""
    model = reference_model(case)
    if model is None:
        vocabulary = case.recipe.model.vocab_size
        if vocabulary > MOST_WORDS:
            yield blame("recipe.model.vocab_size", f"vocab_size {vocabulary} is above {MOST_WORDS}", _REMEDY)
        return
    excess = describe_excess(model)
    if excess is not None:
        yield blame(f"recipe.model.{excess[0]}", excess[1], _REMEDY)


@reading("recipe.data.batch", "recipe.data.seq_len", "recipe.steps")
def size_of_run(case: Case) -> Iterator[Problem]:
    """Reject runs that are too large, because one device trains on all tokens of every step."""
    data, steps = case.recipe.data, case.recipe.steps
    if data.batch * data.seq_len > MOST_TOKENS:
        field = "batch" if data.batch > data.seq_len else "seq_len"
        message = f"batch {data.batch} of seq_len {data.seq_len} has more than {MOST_TOKENS} tokens"
        yield blame(f"recipe.data.{field}", message, "write a batch that one device can train on")
    if steps > MOST_STEPS:
        yield blame(
            "recipe.steps", f"steps {steps} is above {MOST_STEPS}", "write a few: most bugs show in two"
        )


@reading("checkpoint.after", "recipe.steps")
def step_of_save(case: Case) -> Iterator[Problem]:
    """Reject a save after more steps than there are."""
    after, steps = case.checkpoint.after, case.recipe.steps
    if after > steps:
        yield blame(
            "checkpoint.after", f"after {after} is above the {steps} steps of the recipe", "write fewer"
        )


SIZE_RULES = (size_of_model, size_of_run, step_of_save)


RULES = (*SIZE_RULES, *RECIPE_RULES, *AXIS_RULES, *CHOICE_RULES, *PRECISION_RULES, *CHECK_RULES)


def validate(case: Case, *, is_broken: Callable[[str], bool] = lambda path: False) -> list[Problem]:
    """Return the problems of `case` with the rules across fields.

    Each problem has a dotted path, without file or line. `is_broken` says whether a field could not be
    read. A rule is skipped if it reads a broken field, or a field that selects an unknown implementation.
    """
    missing = {
        choice.path: problem
        for choice in CHOICES
        if not is_broken(choice.path) and (problem := report_missing(case, choice)) is not None
    }

    def is_unknown(path: str) -> bool:
        return path in missing or is_broken(path)

    tried = (rule for rule in _list_rules(case, is_unknown) if not any(map(is_unknown, rule.reads)))
    return [*missing.values(), *(problem for rule in tried for problem in rule.find(case))]


def _list_rules(case: Case, is_unknown: Callable[[str], bool]) -> Iterator[Rule]:
    """Yield the rules for every case, and the rules of the implementations that this case selects."""
    yield from RULES
    for choice, chosen in list_chosen(case):
        if not is_unknown(choice.path):
            yield from chosen.rules
