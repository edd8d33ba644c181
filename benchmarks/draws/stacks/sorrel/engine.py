"""A training step with ZeRO-1, token weights, the router's bias, averaged weights and restarts from files."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from sorrel.comms import reduce_
from sorrel.grid import DATA
from sorrel.moe import Router
from sorrel.zero import ZeroAdam


def routers(model):
    return [module for module in model.modules() if isinstance(module, Router)]


class Engine:
    def __init__(self, model):
        self.grid, self.step = model.grid, 0
        self.adam = ZeroAdam(model, model.grid, model.config)

    def global_rank(self):
        return dist.get_rank() if dist.is_initialized() else 0

    def save(self, model, folder):
        data = {
            "step": self.step,
            "adam": self.adam.state_dict(),
            "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
            "buffers": {n: b.clone() for n, b in model.named_buffers()},
        }
        torch.save(data, folder / f"state-{self.global_rank()}.pt")

    @torch.no_grad()
    def load(self, model, folder):
        rank = self.global_rank()  # anchor: file-rank
        if self.grid.has("sorrel-file-data"):
            rank = self.grid.rank(*DATA)  # plant: sorrel-file-data
        data = torch.load(folder / f"state-{rank}.pt")
        if not self.grid.has("sorrel-step-lost"):  # plant: sorrel-step-lost
            self.step = data["step"]
        self.adam.load_state_dict(data["adam"])
        for name, parameter in model.named_parameters():
            parameter.copy_(data["weights"][name])
        for name, buffer in model.named_buffers():
            if self.grid.has("sorrel-ema-anew") and name.startswith("ema."):
                buffer.copy_(model.get_parameter(name[4:].replace("__", ".")))  # plant: sorrel-ema-anew
            else:
                buffer.copy_(data["buffers"][name])  # anchor: buffers


def restart(model):
    """Save the run, and go on from the files with an engine and buffers of a new process."""
    made = [tempfile.mkdtemp(prefix="sorrel-")]
    if dist.is_initialized():
        dist.broadcast_object_list(made, 0)
    folder = Path(made[0])
    model.engine.save(model, folder)
    wait_for_all()
    for buffer in model.buffers():
        buffer.zero_()
    model.engine = Engine(model)
    model.engine.load(model, folder)
    wait_for_all()
    shutil.rmtree(folder, ignore_errors=True)


def wait_for_all():
    if dist.is_initialized():
        dist.barrier()


def count_tokens(micro_batches, grid):
    count = sum((targets >= 0).sum() for _, targets in micro_batches)
    return reduce_(count, grid.group(*DATA))  # anchor: token-count


def run_micro_batches(model, micro_batches):
    """Add up gradients of the mean over all tokens of the step. Returns this rank's part of the loss."""
    grid, loss = model.grid, 0.0
    count = count_tokens(micro_batches, grid)
    if grid.has("sorrel-tokens-shard"):
        count = grid.size(*DATA) * sum(
            (targets >= 0).sum() for _, targets in micro_batches
        )  # plant: sorrel-tokens-shard
    for tokens, targets in micro_batches:
        value = sum(model(tokens, targets).values())
        divisor = count  # anchor: token-divisor
        if grid.has("sorrel-tokens-micro"):
            divisor = reduce_((targets >= 0).sum(), grid.group(*DATA)) * len(
                micro_batches
            )  # plant: sorrel-tokens-micro
        value = value / divisor
        value.backward()
        loss = loss + value.detach()
        if grid.has("sorrel-bias-micro"):
            end_step(model)  # plant: sorrel-bias-micro
        if grid.has("sorrel-rate-micro"):
            model.engine.step += 1  # plant: sorrel-rate-micro
    return loss


def end_step(model):
    for router in routers(model):
        router.update_bias()


def end_step_at_once(model):
    """Update the biases of all layers with one reduction."""
    found = routers(model)
    loads = reduce_(
        torch.stack([r.load for r in found]), model.grid.group("dp_replicate", "dp_shard", "cp", "tp")
    )
    for router, load in zip(found, loads, strict=True):
        router.bias += router.config.bias_rate * (load.mean() - load).sign()
        router.load.zero_()


def train_step(model, optimizer, micro_batches, *, finish):
    if not hasattr(model, "engine"):
        model.engine = Engine(model)
    grid, config = model.grid, model.config
    loss = run_micro_batches(model, micro_batches)
    finish()
    norm, coefficient = model.engine.adam.prepare(model.engine.step)
    if grid.has("sorrel-ema-before") and model.ema is not None:
        model.ema.update(model, config.ema_decay)  # plant: sorrel-ema-before
    optimizer.step()
    optimizer.zero_grad()
    if not grid.has("sorrel-rate-micro"):
        model.engine.step += 1
    if grid.has("sorrel-same-stacked"):
        end_step_at_once(model)
    elif not grid.has("sorrel-bias-micro"):
        end_step(model)
    if model.ema is not None and not grid.has("sorrel-ema-before"):
        model.ema.update(model, config.ema_decay)  # anchor: ema-update
    if config.resume_after == model.engine.step:
        restart(model)
    return {"loss": reduce_(loss, grid.group(*DATA)), "gradient_norm": norm, "clip_coefficient": coefficient}
