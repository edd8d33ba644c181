"""A rule across fields: a function of a case that yields problems, with the fields that it reads.

The fields are named so that a rule is left out where one of them could not be read at all: what it would say
of a stand-in is noise. Problems of a rule carry the dotted path alone; who holds the text adds file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moeverify.case.schema import Case, Layout, MoE, ReferenceModel
from moeverify.errors import Problem

# What decides whether the model is ours to divide, and whether it has experts.
MODEL_OF_LAYOUT = (
    "layout.parallelize",
    "recipe.model.moe",
    "recipe.model.num_layers",
    "recipe.model.num_dense_layers",
)

Find = Callable[[Case], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """What must hold between the fields `reads`; `find` yields how a case breaks it."""

    reads: tuple[str, ...]
    find: Find


def reading(*paths: str) -> Callable[[Find], Rule]:
    """Return a decorator that makes a function the rule over the fields at `paths`."""
    return lambda find: Rule(paths, find)


def blame(path: str, message: str, remedy: str = "") -> Problem:
    """Return the problem of the field at `path`."""
    return Problem(message, path=path, remedy=remedy)


def reference_model(case: Case) -> ReferenceModel | None:
    """Return the case's model if it is the reference transformer."""
    return case.recipe.model.reference


def own_model(case: Case) -> ReferenceModel | None:
    """Return the reference model if the layout is one that moeverify applies, and not a user's function."""
    return None if case.layout.parallelize is not None else reference_model(case)


def experts(case: Case) -> MoE | None:
    """Return the experts of the case's reference model, if any of its layers has some."""
    model = reference_model(case)
    if model is None or model.num_dense_layers >= model.num_layers:
        return None
    return model.moe


def round_up(value: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is not below `value`."""
    return -(-value // divisor) * divisor


def is_asked(layout: Layout, name: str) -> bool:
    """Return whether a field of a layout has another value than its default."""
    return bool(getattr(layout, name) != Layout.model_fields[name].default)
