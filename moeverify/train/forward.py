"""From a micro-batch to this rank's addends of the losses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from moeverify.case.schema import CustomModel, Recipe
from moeverify.errors import CaseError, Problem
from moeverify.model.transformer import ModelOutput
from moeverify.seams import seam
from moeverify.train.data import IGNORED, Batch
from moeverify.train.objective import Losses, Normalizers, router_losses
from moeverify.train.program import Program
from moeverify.train.target import resolve


@seam
def compute_losses(
    recipe: Recipe, program: Program, batch: Batch, normalizers: Normalizers
) -> tuple[Losses, Tensor | None]:
    """Return this rank's addends of the losses, and the detached cross entropy of each token (M, s).

    The second value is None where a user's own loss gives nothing but a sum.
    """
    if isinstance(recipe.model, CustomModel):
        return _foreign_losses(recipe.model, program, batch, normalizers)
    output: ModelOutput = program.model(batch.tokens, batch.positions, batch.valid)
    token_loss = cross_entropy(output.logits, batch.targets)
    lm = token_loss.sum() / normalizers.num_valid
    zero = torch.zeros_like(lm)
    if recipe.model.moe is None:
        return Losses(lm, zero, zero), token_loss.detach()
    if program.own_router_losses is not None:
        return Losses(lm, *program.own_router_losses()), token_loss.detach()
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


def _foreign_losses(
    model: CustomModel, program: Program, batch: Batch, normalizers: Normalizers
) -> tuple[Losses, Tensor | None]:
    """Return the losses of a user's model, and those of each token where it gives them one by one."""
    if model.loss is None:
        logits = _read_logits(program.model(batch.tokens), batch)
        if isinstance(logits, DTensor) and program.loss_context is nullcontext:
            logits = logits.full_tensor()  # torch takes a sharded vocabulary only within its loss_parallel
        found = cross_entropy(logits, batch.targets)
    else:
        found = resolve(model.loss, "recipe.model.loss")(program.model, batch.tokens, batch.targets)
        if isinstance(found, DTensor):
            found = found.full_tensor()
    by_token = found.shape == batch.targets.shape
    if not by_token and found.numel() != 1:
        raise _shape_error(
            f"`{model.loss}` returned shape {tuple(found.shape)}", "return a sum, or a loss a token"
        )
    lm = found.sum() / normalizers.num_valid
    zero = torch.zeros_like(lm)
    return Losses(lm, zero, zero), found.detach() if by_token else None


def _read_logits(output: Any, batch: Batch) -> Tensor:
    """Return the logits (M, s, V) of what a user's model returned: itself, or its `logits`."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        message = f"the model returned {type(output).__name__}, which is no tensor and has no `logits`"
        raise _shape_error(message, "return logits, or name a function with `loss`")
    if logits.ndim != 3 or logits.shape[:2] != batch.targets.shape:
        rows, positions = batch.targets.shape
        message = f"the model returned shape {tuple(logits.shape)} for {rows} rows of {positions} tokens"
        raise _shape_error(message, f"return logits of shape ({rows}, {positions}, vocab_size)")
    return logits


def _shape_error(message: str, remedy: str) -> CaseError:
    return CaseError([Problem(message, path="recipe.model", remedy=remedy)])
