"""Models whose sizes are in a configuration: built with some fields changed. Losses of usual outputs.

A case names `make` of this module, which builds a model like its author's code, but smaller:

    recipe:
      model:
        factory: moeverify.stacks.configured:make
        arguments: {model: "nanogpt.model:GPT", fields: {n_layer: 2, n_embd: 32}}
        loss: moeverify.stacks.configured:loss_with_targets
        vocab_size: 64
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moeverify.errors import CaseError, Problem
from moeverify.stacks.configuration import find_configuration
from moeverify.stacks.constants import offset_constants
from moeverify.train.data import IGNORED
from moeverify.train.forward import cross_entropy

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_SIDE, _COLOURS = 64, 3  # of an image

VOCABULARY = 64
"""The tokens of a model around a single layer."""


def make(model: str, fields: Mapping[str, Any], *, width: int = 0, spread: float = 0.1) -> nn.Module:
    """Return a model with some fields of its configuration changed, and without dropout.

    `model` names a function or class, as `package.module:name`. With `width` it is a layer of that width, and
    gets an embedding before it and a head behind it. Constant tensors get random offsets of scale `spread`;
    see `offset_constants`.

    Raises: CaseError when the model has no configuration.
    """
    built = find_configuration(model, fields).build({})
    if width:
        built = AroundLayer(built, width)
    for each in list_dropouts(built):
        each.p = 0.0
    offset_constants(built.parameters(), spread)
    return built


class AroundLayer(nn.Module):
    """A model of one layer that maps activations of shape (rows, positions, width).

    The first output of that shape counts; losses that the layer returns beside it are left out.
    """

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layer = layer
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens of shape (rows, positions)."""
        logits: Tensor = self.head(find_logits(self.layer(self.embed(tokens)), tokens))
        return logits


def list_dropouts(model: nn.Module) -> list[Any]:
    """Return the dropout modules of a model with a rate above zero."""
    return [
        each for each in model.modules() if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0
    ]


def loss_of_first(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, (B, S), from the logits among several outputs."""
    return cross_entropy(find_logits(model(tokens), tokens), targets)


def loss_with_targets(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, (B, S), of a model that gives all logits only with targets."""
    return cross_entropy(find_logits(model(tokens, targets.clamp(min=0)), tokens), targets)


def loss_of_model(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss that a model computes itself as a sum over all tokens, ().

    The model is called with the tokens, and with the targets if it requires a second argument. No target may be
    left out, since the model may count it.

    Raises: CaseError when no output is a number that has a gradient.
    """
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = inspect.signature(inside.forward).parameters.values()
    required = [each for each in parameters if each.kind in _POSITIONAL and each.default is each.empty]
    for part in _list_tensors(model(tokens, targets) if len(required) > 1 else model(tokens)):
        if part.ndim == 0 and part.requires_grad:
            return part * targets.numel()
    raise _refuse_outputs("no output of the model is a loss")


def loss_of_images(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a classifier of images, as the loss of each token, (B, S).

    Each row of tokens becomes an image of (channels, 64, 64) whose class is the first target of the row.
    """
    channels = next((each.in_channels for each in model.modules() if isinstance(each, nn.Conv2d)), _COLOURS)
    position = torch.arange(channels * _SIDE**2, device=tokens.device)
    values = (tokens[:, position % tokens.shape[1]] + position).to(next(model.parameters()).dtype).sin()
    for part in _list_tensors(model(values.view(-1, channels, _SIDE, _SIDE))):
        if part.ndim == 2 and len(part) == len(tokens):
            loss = nn.functional.cross_entropy(part, targets[:, 0] % part.shape[1], reduction="none")
            return loss[:, None].expand(targets.shape) * (targets != IGNORED)
    raise _refuse_outputs("no output of the model has the shape (images, classes)")


def find_logits(output: Any, tokens: Tensor) -> Tensor:
    """Return the first output of shape (B, S, V).

    Raises: CaseError when there is none.
    """
    for part in _list_tensors(output):
        if part.ndim == 3 and part.shape[:2] == tokens.shape:
            return part
    raise _refuse_outputs("no output of the model has the shape (rows, positions, vocabulary)")


def _list_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors among the outputs of a model, whole."""
    parts = output.values() if isinstance(output, Mapping) else output
    for part in parts if isinstance(parts, tuple | list) or isinstance(output, Mapping) else [output]:
        if isinstance(part, Tensor):
            yield part.full_tensor() if isinstance(part, DTensor) else part


def _refuse_outputs(message: str) -> CaseError:
    return CaseError([Problem(message, path="recipe.model", remedy="write a `loss(model, tokens, targets)`")])
