"""Test that one device trains without NaN and infinity, with which no layout can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

from moeverify.cases.schema import Recipe
from moeverify.errors import CaseError, Problem
from moeverify.results.checks import Kind
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.verification.compare.comparison import Comparison
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.golden_run.operator_calls import OperatorCalls, find_user_line

# Kinds of tensors that training needs finite, in the order in which a step computes them.
_KINDS = (Kind.LOSS, Kind.GRADIENT, Kind.UPDATE)


class _Found(Exception):
    """Raised at the first operator that makes NaN, with the line of the user's code."""


def check_finite(recipe: Recipe, reference: StoredGolden, device: torch.device) -> None:
    """Check that losses, gradients and updates of a golden are finite at all steps.

    Raises: CaseError with the first one that is not, and the user's line that makes the first NaN.
    """
    for step in range(recipe.steps):
        wrong = {key: number for key in reference.keys(step) if (number := _count(reference, step, key))}
        if not wrong:
            continue
        key = min(wrong, key=lambda each: _KINDS.index(Kind(each.partition("/")[0])))
        kind, _, name = key.partition("/")
        program = assemble_single(recipe, device, compute="float64")
        line = find_nan(partial(train, recipe, program, Comparison(reference, hash_bits=False)))
        message = (
            f"`{recipe.model.title}` is not finite on one device: {kind.replace('_', ' ')} {name} at step {step} "
            f"(NaN or infinite elements: {wrong[key]})"
        )
        message += f"; the first NaN is made at {line}" if line else ""
        remedy = "mend the model, or train fewer steps or with a lower rate; NaN equals no number of a layout"
        raise CaseError([Problem(message, path="recipe", remedy=remedy)])


def find_nan(call: Callable[[], object]) -> str:
    """Return the line of the user's code that makes the first NaN of a call, as `file:line: source`, or ""."""

    def look(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        is_taken = any(map(_has_nan, tree_iter((args, kwargs))))  # an operator may write to its operands
        made = func(*args, **kwargs)
        is_blank = func._schema.name.startswith("aten::empty")  # such memory may hold NaN
        if not (is_taken or is_blank) and any(map(_has_nan, tree_iter(made))):
            raise _Found(find_user_line())
        return made

    try:
        with OperatorCalls(look):
            call()
    except _Found as found:
        return str(found)
    return ""


def _count(reference: StoredGolden, step: int, key: str) -> int:
    """Return the number of elements of a golden's tensor that are not finite."""
    if key.partition("/")[0] not in _KINDS:
        return 0
    return int((~reference.whole(step, key).isfinite()).sum())


def _has_nan(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())
