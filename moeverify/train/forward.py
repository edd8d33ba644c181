"""The forward pass of a micro-batch, from tokens to this rank's part of the losses."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moeverify.cases.schema import MoE, Recipe
from moeverify.model.transformer import ModelOutput
from moeverify.seams import seam
from moeverify.train.data import IGNORED, MicroBatch
from moeverify.train.objective import Losses, Normalizers, router_losses
from moeverify.train.program import TrainingProgram
from moeverify.train.subject import Run


@seam
def compute_losses(
    recipe: Recipe, program: TrainingProgram, batch: MicroBatch, normalizers: Normalizers
) -> tuple[Losses, Tensor | None]:
    """Return this rank's part of each loss, and the detached cross entropy of each token (M, s).

    The second value is None where a user's loss gives only a sum.
    """
    return program.subject.compute_losses(program, batch, normalizers)


def reference_losses(
    moe: MoE | None, run: Run, batch: MicroBatch, normalizers: Normalizers
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


MOST_LOGITS = 1 << 27
"""Logits that `cross_entropy` widens and normalizes at a time: 1 GiB in float64."""


@seam
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, in float32 or wider; zero where the target is `IGNORED`.

    Above `MOST_LOGITS`, chunks of tokens are computed one by one, and again in the backward pass.

    Shapes: logits (M, s, V), plain or sharded over V; targets (M, s). Returns a plain tensor (M, s).
    """
    flat, flat_targets = logits.flatten(0, 1), targets.flatten()
    wide = torch.promote_types(logits.dtype, torch.float32)
    if flat.numel() <= MOST_LOGITS or isinstance(flat, DTensor):
        loss = _entropy_of_tokens(flat, flat_targets, wide)
    else:
        size = max(1, MOST_LOGITS // flat.shape[-1])
        chunks = zip(torch.split(flat, size), torch.split(flat_targets, size), strict=True)
        # The entropy draws no random numbers, so the states of generators need not be kept.
        again = partial(checkpoint, _entropy_of_tokens, use_reentrant=False, preserve_rng_state=False)
        loss = torch.cat([again(*chunk, wide) for chunk in chunks])
    if isinstance(loss, DTensor):
        loss = loss.to_local()
    return loss.view(targets.shape)


def _entropy_of_tokens(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cross entropy (N,) for logits (N, V), computed in `dtype`."""
    return F.cross_entropy(logits.to(dtype), targets, reduction="none", ignore_index=IGNORED)
