"""Test that a user's model has a unique answer; without one, every layout would appear correct.

Tolerances are calibrated with changes on one device that must not matter. The answer of some models does
depend on them: with dropout, a mean instead of a sum, or layers that mix rows. Their bounds would become
too wide to detect any error. The first step is therefore tested in float64, where such changes have no
visible effect on a sound model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from moeverify.cases.schema import Recipe
from moeverify.errors import CaseError, Problem
from moeverify.explain.operators import has_dropout
from moeverify.results.checks import Kind
from moeverify.train.assemble import assemble_single
from moeverify.train.data import Share
from moeverify.train.loop import train
from moeverify.train.program import TrainingProgram
from moeverify.verification.compare.comparison import Comparison, ExpectedValues
from moeverify.verification.golden_run.operator_calls import OperatorCalls, find_user_line


def find_draws(call: Callable[[], object]) -> list[str]:
    """Return the lines of the user's code that draw random numbers during a call, as `file:line: source`."""
    lines: dict[str, None] = {}

    def note(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and has_dropout(func, args, kwargs):
            lines[find_user_line()] = None
        return func(*args, **kwargs)

    with OperatorCalls(note):
        call()
    return list(filter(None, lines))


LIMIT = 1e-3
"""The maximum relative change of losses and gradients; parts that compute in float32 change by 1e-6."""

_REPEATED = "each time"
_KINDS = (Kind.TOKEN_LOSS, Kind.LOSS, Kind.GRADIENT)


@dataclass(frozen=True)
class _Variant:
    """A program that must give the same answer; `when` and `remedy` are for the error message otherwise."""

    program: TrainingProgram
    when: str
    remedy: str


def check_soundness(recipe: Recipe, reference: ExpectedValues, device: torch.device) -> None:
    """Check that the answer of a user's model is independent of changes that every layout makes.

    `reference` has the golden's first step.

    Raises: CaseError when the answer changes by more than `LIMIT`.
    """
    single_step = recipe.model_copy(update={"steps": 1})
    for variant in _list_variants(recipe, device):
        comparison = Comparison(reference, hash_bits=False)
        train(single_step, variant.program, comparison)
        kind, error = _find_worst(comparison)
        if error > LIMIT:
            message = (
                f"`{recipe.model.title}` computes another {kind} {variant.when}: "
                f"off by {error:.2g} of its norm"
            )
            if variant.when == _REPEATED:
                again = partial(train, single_step, variant.program, Comparison(reference, hash_bits=False))
                message += "".join(f"; random numbers are drawn at {line}" for line in find_draws(again)[:1])
            raise CaseError([Problem(message, path="recipe.model", remedy=variant.remedy)])


def _list_variants(recipe: Recipe, device: torch.device) -> Iterator[_Variant]:
    yield _Variant(
        assemble_single(recipe, device, compute="float64"),
        _REPEATED,
        "switch off dropout and whatever else is random",
    )
    rows = tuple(reversed(range(recipe.data.batch)))
    share = Share(rows, range(recipe.data.seq_len))
    yield _Variant(
        assemble_single(recipe, device, compute="float64", share=share),
        "when the rows of the batch are in another order",
        "no layer may mix rows, and the loss must be a sum over the valid tokens",
    )
    if recipe.data.batch % 2 == 0 and recipe.step is None:
        regrouped = assemble_single(recipe, device, compute="float64")
        regrouped.num_micro_batches = 2
        yield _Variant(
            regrouped,
            "when the batch is cut in two",
            "let the loss be a sum over the valid tokens and not a mean, and no layer mix rows",
        )


def _find_worst(comparison: Comparison) -> tuple[str, float]:
    """Return the kind with the largest error over all of its tensors together, and the error."""
    squares: dict[str, tuple[float, float]] = dict.fromkeys(_KINDS, (0.0, 0.0))
    for entry in comparison.entries():
        if entry.kind in squares:
            error, norm = squares[entry.kind]
            difference = entry.difference
            squares[entry.kind] = error + difference.sum_error2, norm + difference.sum_expected2
    errors = {kind: _relative(*pair) for kind, pair in squares.items()}
    worst = max(errors, key=lambda kind: errors[kind])
    return worst.replace("_", " "), errors[worst]


def _relative(error: float, norm: float) -> float:
    if not math.isfinite(error):
        return math.inf
    if error == 0.0:
        return 0.0
    return math.sqrt(error / norm) if norm > 0.0 else math.inf
