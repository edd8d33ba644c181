"""Initial values from a folder of weights: of the reference model each rank reads its own part, of others all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from moeverify.case.schema import Recipe, ReferenceModel
from moeverify.errors import CaseError, FormatError, Problem
from moeverify.results.initial_values import InitialSource
from moeverify.weights.by_name import load_by_name
from moeverify.weights.description import CONFIG, Description, read_config_file
from moeverify.weights.load import load_weights

_REMEDY = (
    "let `model` describe what is there; `moeverify convert --drop` writes a folder without some tensors"
)


def find_source(recipe: Recipe) -> InitialSource:
    """Return where the initial values of a recipe's model come from."""
    if recipe.model.weights is not None:
        return "weights"
    return "factory" if recipe.model.reference is None else "seed"


def load_named(model: nn.Module, folder: str) -> None:
    """Fill a user's model with the weights of a folder, by the names of its tensors.

    Raises: CaseError with everything that does not fit, by file and tensor.
    """
    with _named_problems("store the tensors under the names of the model's own `state_dict()`"):
        load_by_name(model, Path(folder))


def load_initial(spec: ReferenceModel, dtype: torch.dtype, model: nn.Module) -> None:
    """Fill this rank's shards of the reference model with the weights of `spec.weights`, rounded to `dtype`.

    The golden and every layout start from the same numbers, whatever the dtype of their parameters is.

    Raises: CaseError with everything that does not fit, by file and tensor.
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
