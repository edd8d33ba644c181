"""From a micro-batch to this rank's addends of the losses."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from moeverify.case.schema import ForeignModel, Recipe
from moeverify.errors import CaseError, Problem
from moeverify.model.transformer import ModelOutput
from moeverify.train.data import IGNORED, Batch
from moeverify.train.objective import Losses, Normalizers, router_losses
from moeverify.train.program import Program


def compute_losses(
    recipe: Recipe, program: Program, batch: Batch, normalizers: Normalizers
) -> tuple[Losses, Tensor]:
    """Return this rank's addends of the losses, and the detached cross entropy of each token (M, s).

    A foreign model's own loss is a sum over its tokens; then the second value has that sum in its place, ().
    """
    if isinstance(recipe.model, ForeignModel):
        return _foreign_losses(recipe.model, program, batch, normalizers)
    output: ModelOutput = program.model(batch.tokens, batch.positions, batch.valid)
    token_loss = cross_entropy(output.logits, batch.targets)
    lm = token_loss.sum() / normalizers.num_valid
    zero = torch.zeros_like(lm)
    if recipe.model.moe is None:
        return Losses(lm, zero, zero), token_loss.detach()
    balance, z = router_losses(recipe.model.moe, output.routers, batch, normalizers, program.sums)
    return Losses(lm, balance, z), token_loss.detach()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, in at least float32, zero where the target is ignored.

    Shapes: logits (M, s, V), plain or sharded over V; targets (M, s); returns (M, s), a plain tensor.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.flatten(0, 1).to(wide)
    loss = F.cross_entropy(flat, targets.flatten(), reduction="none", ignore_index=IGNORED)
    if isinstance(loss, DTensor):
        loss = loss.to_local()
    return loss.view(targets.shape)


def resolve(target: str, path: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names.

    Raises: CaseError, naming the field `path`, where there is no such module or function.
    """
    module_name, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        remedy = "is its folder on PYTHONPATH?"
        raise CaseError([Problem(f"cannot import `{target}`: {error}", path=path, remedy=remedy)]) from error
    if not callable(found):
        raise CaseError([Problem(f"`{target}` is not a function", path=path)])
    function: Callable[..., Any] = found
    return function


def _foreign_losses(
    model: ForeignModel, program: Program, batch: Batch, normalizers: Normalizers
) -> tuple[Losses, Tensor]:
    if model.loss is None:
        output = program.model(batch.tokens)
        logits = output.logits if hasattr(output, "logits") else output
        token_loss = cross_entropy(logits, batch.targets)
        total = token_loss.sum()
    else:
        total = resolve(model.loss, "recipe.model.loss")(program.model, batch.tokens, batch.targets)
        token_loss = total
    lm = total / normalizers.num_valid
    zero = torch.zeros_like(lm)
    return Losses(lm, zero, zero), token_loss.detach()
