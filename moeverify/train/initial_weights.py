"""Initial values from a folder of weights.

Each rank reads only its own part of the reference model, and the whole of a user's model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from moeverify.cases.schema import Recipe, ReferenceModel
from moeverify.errors import CaseError, FormatError, Problem
from moeverify.results.initial_values import InitialSource
from moeverify.tools.weights.by_name import load_by_name
from moeverify.tools.weights.description import CONFIG, Description, read_config_file
from moeverify.tools.weights.load import load_weights

_REMEDY = (
    "let `model` describe these weights; `moeverify convert --drop` writes a folder without some tensors"
)


def find_source(recipe: Recipe) -> InitialSource:
    """Return the kind of source of a model's initial values: a weights folder, a seed or a factory."""
    if recipe.model.weights is not None:
        return "weights"
    return "factory" if recipe.model.reference is None else "seed"


def load_named(model: nn.Module, folder: str) -> None:
    """Load the weights of a folder into a user's model, by tensor name.

    Raises: CaseError with every mismatch, by file and tensor.
    """
    with _named_problems("store the tensors under the names of the model's own `state_dict()`"):
        load_by_name(model, Path(folder))


def load_initial(spec: ReferenceModel, dtype: torch.dtype, model: nn.Module) -> None:
    """Load the weights of `spec.weights` into this rank's shards of the reference model, rounded to `dtype`.

    The golden and every layout start from the same numbers, whatever the dtype of their parameters.

    Raises: CaseError with every mismatch, by file and tensor.
    """
    assert spec.weights is not None
    folder = Path(spec.weights)
    described = Description(spec.model_copy(update={"weights": None}))
    with _named_problems(_REMEDY):
        if (folder / CONFIG).exists():
            described = Description(described.model, read_config_file(folder / CONFIG).config)
        load_weights(model, folder, described=described, rounded_to=dtype)


@contextmanager
def _named_problems(remedy: str) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        path = "recipe.model.weights"
        problems = error.problem.splitlines()
        raise CaseError([Problem(text, path=path, remedy=remedy) for text in problems]) from error
