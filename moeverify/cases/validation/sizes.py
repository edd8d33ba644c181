"""Rules that reject sizes beyond any existing model before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.rule import blame, reading, reference_model
from moeverify.cases.schema import Case
from moeverify.cases.size import MOST_STEPS, MOST_TOKENS, MOST_WORDS, describe_excess
from moeverify.errors import Problem

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


SIZE_RULES = (size_of_model, size_of_run)
