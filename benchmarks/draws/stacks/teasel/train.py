"""Training steps: AdamW, Muon, Adafactor, averaged weights, and a restart from a whole checkpoint."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from teasel.comm import local_part, psum
from teasel.dims import ParallelDims
from teasel.losses import Normalizer, compute_terms
from teasel.moe import update_expert_biases
from teasel.optim import Average, Factored, Muon, clip_gradients, own_part
from teasel.parallel import expert_parameters, has_ep, reduce_expert_gradients, resolve_partial_gradients
from teasel.pipeline import Pipeline


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DDP) else model


def gradient_sync(model: nn.Module, *, enabled: bool):
    """Return the context of a micro-batch; gradients are reduced in the last one alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    if isinstance(model, DDP) and not enabled:
        return model.no_sync()
    return contextlib.nullcontext()


class Accumulator:
    """Forward and backward passes of the micro-batches of one step."""

    def __init__(self, model: nn.Module, micro_batches, optimizer) -> None:
        self.model, self.micro_batches, self.optimizer = model, micro_batches, optimizer
        self.root = unwrap(model)
        self.dims: ParallelDims = self.root.dims
        self.normalizer = Normalizer.count(micro_batches, self.dims)

    @property
    def grad_scale(self) -> float:
        """Return the factor on the loss: gradients are sums, where data parallelism averages them."""
        averages = isinstance(self.model, DDP) or self.dims.option("average")
        if not averages:
            return 1.0
        if self.dims.on("teasel-ddp-scale"):
            return float(self.dims["batch"].size)  # plant: teasel-ddp-scale
        return float(self.dims["loss"].size)  # anchor: ddp-scale

    def is_last(self, i: int) -> bool:
        if self.dims.on("teasel-sync-first"):
            return i == 0  # plant: teasel-sync-first
        return i == len(self.micro_batches) - 1  # anchor: sync-last

    def run(self) -> Tensor:
        """Accumulate gradients, and return the loss of the global batch."""
        dims = self.dims
        main = torch.zeros((), dtype=torch.float64)
        extra = torch.zeros((), dtype=torch.float64)
        for i, (tokens, targets) in enumerate(self.micro_batches):
            with gradient_sync(self.model, enabled=self.is_last(i)):
                if dims.on("teasel-zero-grad-inside"):
                    self.optimizer.zero_grad()  # plant: teasel-zero-grad-inside
                terms = compute_terms(self.model, tokens, targets, dims)
                loss, aux = self.normalizer.combine(terms, self.root.config.lm_z_coef)
                total = loss + aux  # anchor: total
                if dims.on("teasel-scaled-again"):
                    total = (loss + aux) / len(self.micro_batches)  # plant: teasel-scaled-again
                (total * self.grad_scale).backward()
            main, extra = main + loss.detach(), extra + aux.detach()
        self.scale_expert_gradients()
        if not dims.on("teasel-report-aux"):  # plant: teasel-report-aux
            extra = psum(extra, dims["tp"])  # anchor: report-aux
        return psum(main + extra, dims["loss"])

    @torch.no_grad()
    def scale_expert_gradients(self) -> None:
        """Undo the factor on the loss for weights that are not averaged."""
        factor = self.grad_scale
        if self.dims.on("teasel-ddp-expert-scale"):
            factor = 1.0  # plant: teasel-ddp-expert-scale
        if factor != 1.0 and has_ep(self.dims):
            for weight in expert_parameters(self.root):
                local_part(weight.grad).div_(factor)  # anchor: expert-scale


def accumulate(model: nn.Module, optimizer, micro_batches, clip_norm: float):
    """Make complete and clipped gradients. Returns what a step reports."""
    if unwrap(model).dims["pp"].size > 1:
        passes = Pipeline(model, micro_batches)
    else:
        passes = Accumulator(model, micro_batches, optimizer)
    loss, root, dims = passes.run(), passes.root, passes.dims
    if dims.on("teasel-clip-first"):
        resolve_partial_gradients(root, dims)
        norm, coefficient = clip_gradients(root, clip_norm, dims)
        reduce_expert_gradients(root, dims)  # plant: teasel-clip-first
    else:
        resolve_partial_gradients(root, dims)
        reduce_expert_gradients(root, dims)  # anchor: reduce-first
        norm, coefficient = clip_gradients(root, clip_norm, dims)
    return {"loss": loss, "gradient_norm": norm, "clip_coefficient": coefficient}


def finish_step(model: nn.Module, optimizer, scheduler, n_micro_batches: int) -> None:
    root = unwrap(model)
    optimizer.step()
    if root.dims.on("teasel-schedule-each-micro"):
        for _ in range(n_micro_batches):
            scheduler.step()  # plant: teasel-schedule-each-micro
    else:
        scheduler.step()  # anchor: schedule
    optimizer.zero_grad()
    update_expert_biases(root, root.dims)


def train_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    report = accumulate(model, optimizer, micro_batches, clip_norm)
    finish_step(model, optimizer, scheduler, len(micro_batches))
    return report


def _recipe_step(kind, model, optimizer, micro_batches, scheduler, clip_norm):
    root = unwrap(model)
    if root.state is None:
        root.state = kind(root, root.dims)
    report = accumulate(model, optimizer, micro_batches, clip_norm)
    root.state.apply()
    finish_step(model, optimizer, scheduler, len(micro_batches))
    return report


def muon_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    return _recipe_step(Muon, model, optimizer, micro_batches, scheduler, clip_norm)


def factored_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    return _recipe_step(Factored, model, optimizer, micro_batches, scheduler, clip_norm)


def averaged_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    root = unwrap(model)
    if root.state is None:
        root.state = Average(root, root.dims)
    report = train_step(model, optimizer, micro_batches, scheduler=scheduler, clip_norm=clip_norm)
    n_updates = 1  # anchor: one-update
    if root.dims.on("teasel-average-each-micro"):
        n_updates = len(micro_batches)  # plant: teasel-average-each-micro
    for _ in range(n_updates):
        root.state.update()
    root.state.load()
    return report


def restart_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    """Save and load the weights after every step, as a run does that is preempted all the time."""
    report = train_step(model, optimizer, micro_batches, scheduler=scheduler, clip_norm=clip_norm)
    root = unwrap(model)
    load_whole(root, save_whole(root), root.dims)
    return report


@torch.no_grad()
def save_whole(model: nn.Module) -> dict[str, Tensor]:
    """Return whole weights and buffers, on every rank."""
    state = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        value = value.detach()
        state[name] = value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
    return state


@torch.no_grad()
def load_whole(model: nn.Module, state: dict[str, Tensor], dims: ParallelDims) -> None:
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        own = own_part(state[name], value)  # anchor: load-own
        if dims.on("teasel-load-tp-rank") and ".experts." in name:
            n_rows = len(local_part(value))
            first = dims["tp"].rank * n_rows
            own = state[name][first : first + n_rows]  # plant: teasel-load-tp-rank
        local_part(value.detach()).copy_(own)
