"""An author's own training step: micro-batches, a clip by one norm over all ranks, and the schedule."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from my_moe.model import loss


def train_step(model, optimizer, micro_batches, *, mesh, finish, scheduler, num_valid, clip_norm):
    """Make one optimizer step of this rank's micro-batches; `mesh` is None on one device."""
    # Gradients are averaged over the ranks, and the loss is the mean over the whole batch.
    num_ranks = 1 if mesh is None else mesh.size()
    total = 0.0
    for tokens, targets in micro_batches:
        part = loss(model, tokens, targets) * (num_ranks / num_valid)
        part.backward()
        total += part.detach() / num_ranks
    finish()
    norm = clip(model, clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if mesh is not None:
        dist.all_reduce(total)
    return {
        "loss": total,
        "gradient_norm": norm,
        "clip_coefficient": min(1.0, clip_norm / (float(norm) + 1e-6)),
    }


def clip(model, limit):
    """Clip all gradients by their norm and return it. torch's own clip does not accept several meshes."""
    gradients = [weight.grad for weight in model.parameters()]
    norm = torch.stack([whole_norm(gradient) for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (float(norm) + 1e-6)))
    return norm


def whole_norm(gradient):
    """Return the norm of a gradient, over all ranks that have a part of it."""
    norm = gradient.norm()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
