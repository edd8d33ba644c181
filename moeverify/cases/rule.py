"""Rules across fields: functions that yield the problems of a case, with the fields that they read.

A rule is skipped if one of these fields is unreadable, since a problem caused by its placeholder value
would be meaningless. Problems of a rule contain only the dotted path. The caller that has the text adds
file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moeverify.cases.schema import Case, Layout, MoE, ReferenceModel
from moeverify.errors import Problem

# Fields that decide whether moeverify parallelizes the model, and whether the model has experts.
MODEL_OF_LAYOUT = (
    "layout.parallelize",
    "recipe.model.moe",
    "recipe.model.num_layers",
    "recipe.model.num_dense_layers",
)

Find = Callable[[Case], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """A condition on the fields `reads`. `find` yields the problems of a case that violates it."""

    reads: tuple[str, ...]
    find: Find


def reading(*paths: str) -> Callable[[Find], Rule]:
    """Return a decorator that turns a function into a rule over the fields at `paths`."""
    return lambda find: Rule(paths, find)


def blame(path: str, message: str, remedy: str = "") -> Problem:
    """Return a problem of the field at `path`."""
    return Problem(message, path=path, remedy=remedy)


def reference_model(case: Case) -> ReferenceModel | None:
    """Return the model of a case if it is the reference transformer."""
    return case.recipe.model.reference


def own_model(case: Case) -> ReferenceModel | None:
    """Return the reference model if moeverify parallelizes it, or None if a user's function does."""
    return None if case.layout.parallelize is not None else reference_model(case)


def experts(case: Case) -> MoE | None:
    """Return the experts of a case's reference model, if any of its layers has experts."""
    model = reference_model(case)
    if model is None or model.num_dense_layers >= model.num_layers:
        return None
    return model.moe


def round_up(value: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is not below `value`."""
    return -(-value // divisor) * divisor


def is_asked(layout: Layout, name: str) -> bool:
    """Return whether a field of a layout differs from its default."""
    return bool(getattr(layout, name) != Layout.model_fields[name].default)
