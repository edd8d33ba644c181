"""Whether a user's model has one answer at all: without that every layout would look right.

Tolerances are calibrated on what one device shows under changes that must not matter. A model whose answer
does depend on them (dropout, a mean in place of a sum, layers that mix rows) would calibrate itself bounds so
wide that nothing could break them. So its first step is tried in float64, where such changes show nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moeverify.case.schema import Recipe
from moeverify.compare.comparison import Comparison, Reference
from moeverify.errors import CaseError, Problem
from moeverify.results.checks import Kind
from moeverify.train.assemble import assemble_single
from moeverify.train.data import Share
from moeverify.train.loop import train
from moeverify.train.program import Program

LIMIT = 1e-3
"""How far losses and gradients may move, relative to their norm; parts that compute in float32 move by 1e-6."""

_KINDS = (Kind.TOKEN_LOSS, Kind.LOSS, Kind.GRADIENT)


@dataclass(frozen=True)
class _Variant:
    """A program whose answer must be that of the plain one; `when` and `remedy` are for the error if it is not."""

    program: Program
    when: str
    remedy: str


def check_soundness(recipe: Recipe, reference: Reference, device: torch.device) -> None:
    """Make sure that the answer of a user's model does not depend on what no layout could keep.

    `reference` holds the golden's first step.

    Raises: CaseError.
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
            raise CaseError([Problem(message, path="recipe.model", remedy=variant.remedy)])


def _list_variants(recipe: Recipe, device: torch.device) -> Iterator[_Variant]:
    yield _Variant(
        assemble_single(recipe, device, compute="float64"),
        "each time",
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
    """Return the kind that differs most, with all of its tensors taken together, and by how much."""
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
