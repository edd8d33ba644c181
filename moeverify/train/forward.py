"""The forward pass of a micro-batch, from tokens to this rank's part of the losses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from moeverify.cases.schema import MoE, Recipe
from moeverify.model.transformer import ModelOutput
from moeverify.seams import seam
from moeverify.train.data import IGNORED, Batch
from moeverify.train.objective import Losses, Normalizers, router_losses
from moeverify.train.program import Program
from moeverify.train.subject import Run


@seam
def compute_losses(
    recipe: Recipe, program: Program, batch: Batch, normalizers: Normalizers
) -> tuple[Losses, Tensor | None]:
    """Return this rank's part of each loss, and the detached cross entropy of each token (M, s).

    The second value is None where a user's loss gives only a sum.
    """
    return program.subject.compute_losses(program, batch, normalizers)


def reference_losses(
    moe: MoE | None, run: Run, batch: Batch, normalizers: Normalizers
) -> tuple[Losses, Tensor | None]:
    """Return the losses of the reference model, as `compute_losses` does; `moe` is None for a dense model."""
    output: ModelOutput = run.model(batch.tokens, batch.positions, batch.valid)
    token_loss = cross_entropy(output.logits, batch.targets)
    # Divide by the tokens of the global batch, not of this rank, so that the losses of all ranks add up.
    lm = token_loss.sum() / normalizers.num_valid
    zero = torch.zeros_like(lm)
    if moe is None:
        return Losses(lm, zero, zero), token_loss.detach()
    if run.own_router_losses is not None:
        return Losses(lm, *run.own_router_losses()), token_loss.detach()
    balance, z = router_losses(moe, output.routers, batch, normalizers, run.sums)
    return Losses(lm, balance, z), token_loss.detach()


@seam
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, in float32 or wider; zero where the target is `IGNORED`.

    Shapes: logits (M, s, V), plain or sharded over V; targets (M, s). Returns a plain tensor (M, s).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.flatten(0, 1).to(wide)
    loss = F.cross_entropy(flat, targets.flatten(), reduction="none", ignore_index=IGNORED)
    if isinstance(loss, DTensor):
        loss = loss.to_local()
    return loss.view(targets.shape)
