"""All rules across fields, applied to a case; and the rules of sizes and of the precision `mixed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moeverify.cases.axes.rules import AXIS_RULES
from moeverify.cases.choice import report_missing
from moeverify.cases.rule import Rule, blame, reading, reference_model
from moeverify.cases.schema import Case
from moeverify.cases.size import MOST_STEPS, MOST_TOKENS, MOST_WORDS, describe_excess
from moeverify.cases.validation.checks import CHECK_RULES
from moeverify.cases.validation.choices import CHOICE_RULES, CHOICES, list_chosen
from moeverify.cases.validation.recipe import RECIPE_RULES
from moeverify.errors import Problem
from moeverify.parallel.data_parallel import DATA_PARALLEL


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
