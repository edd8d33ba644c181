"""One optimizer step, with running averages and an intermediate restart from a checkpoint."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mystack import checkpointing
from mystack.model import loss

DECAY = 0.9


def train_step(model, optimizer, micro_batches, *, mesh, finish, scheduler, num_valid, clip_norm):
    options = model.options
    if mesh is not None and options.get("restart_at") == model.done:
        checkpointing.restart(model, optimizer, mesh, options)
    elif mesh is not None and options.get("restart_at"):
        checkpointing.save(model, optimizer, options)
    if mesh is not None and "rejoin" in options and model.done == options["rejoin"]:
        _rejoin(optimizer, mesh)
    num_ranks = 1 if mesh is None else mesh.size() // mesh["tp"].size()
    total = 0.0
    for tokens, targets in micro_batches:
        terms = loss(model, tokens, targets)
        if mesh is not None and options.get("loss") == "fused":
            part = sum(terms.values()) / (targets.numel() * len(micro_batches))  # plant: p50
        else:
            part = sum(terms.values()) * (num_ranks / num_valid)
        part.backward()
        total += part.detach() / num_ranks
    finish()
    norm = clip(model, clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if hasattr(model, "average"):
        _average(model)
    model.done += 1
    if mesh is not None:
        dist.all_reduce(total)
        total /= mesh["tp"].size()
    return {
        "loss": total,
        "gradient_norm": norm,
        "clip_coefficient": min(1.0, clip_norm / (float(norm) + 1e-6)),
    }


@torch.no_grad()
def _average(model):
    weights = dict(model.named_parameters())
    for name in model.average.names:
        weight = weights[name]
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        buffer = model.average.get_buffer(name.replace(".", "_"))
        buffer.mul_(DECAY).add_(weight, alpha=1 - DECAY)


def _rejoin(optimizer, mesh):
    """Let a replica that has rejoined take the optimizer options of its peers."""
    for group in optimizer.param_groups:
        if mesh["dp_replicate"].get_local_rank() == 1:
            group["lr"] = group["initial_lr"]  # plant: p60


def clip(model, limit):
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = torch.stack([whole_norm(gradient) for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (float(norm) + 1e-6)))
    return norm


def whole_norm(gradient):
    norm = gradient.norm()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
