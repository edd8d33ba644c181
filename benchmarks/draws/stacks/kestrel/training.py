"""Custom steps: Muon for matrices, a clip by one norm over all experts, a pipeline over an axis."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from kestrel.model import loss

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def run_micro_batches(model, micro_batches, mesh, num_valid):
    ranks = 1 if mesh is None else mesh["dp_replicate"].size() * mesh["dp_shard"].size()
    total = 0.0
    for tokens, targets in micro_batches:
        part = loss(model, tokens, targets) * (ranks / num_valid)
        part.backward()
        total = total + part.detach() / ranks
    if mesh is not None:
        dist.all_reduce(total, group=mesh["dp_shard"].get_group())
    return total


def newton_schulz(matrix, steps=5):
    a, b, c = COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)
    wide = x.shape[0] > x.shape[1]
    x = x.T if wide else x
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if wide else x


def orthogonalize_fused(matrix, blocks, head_dim):
    """Orthogonalize each kind of row of a fused projection; `blocks` are the heads per kind in a group."""
    groups = matrix.unflatten(0, (-1, sum(blocks) * head_dim))
    done = []
    for part in groups.split([each * head_dim for each in blocks], dim=1):
        done.append(newton_schulz(part.flatten(0, 1)).view_as(part))
    return torch.cat(done, dim=1).flatten(0, 1)


def muon_direction(name, weight, momentum, model, mesh):
    plan = model.plan or {}
    mode = plan.get("mode", "")
    whole = momentum
    cut = getattr(weight, "cut", None)
    if mode == "p24":
        cut = None  # plant: p24
    if cut is not None:
        whole = gather(momentum, cut, plan["tp"])
    elif isinstance(momentum, DTensor):
        whole = momentum.full_tensor()
    if name.endswith("qkv.weight"):
        r = model.config["heads"] // model.config["kv_heads"]
        d = model.config["head_dim"]
        blocks = [r, r, 1, 1]
        rows = whole.shape[0]
        if mode == "p25":
            rows = weight.to_local().shape[0]  # plant: p25
        if mode == "p26":
            blocks = [r, 1, 1]  # plant: p26
        if rows % (sum(blocks) * d) == 0:
            done = orthogonalize_fused(whole, blocks, d)  # plant: p24 p26
        else:
            done = newton_schulz(whole)  # plant: p25
    else:
        done = newton_schulz(whole)  # plant: p24
    if cut is not None:
        return done.chunk(plan["tp"].size(), cut)[plan["tp"].get_local_rank()]
    if isinstance(momentum, DTensor):
        return distribute_tensor(done, momentum.device_mesh, momentum.placements)
    return done


def gather(local, dim, mesh):
    parts = [torch.empty_like(local.contiguous()) for _ in range(mesh.size())]
    dist.all_gather(parts, local.contiguous(), group=mesh.get_group())
    return torch.cat(parts, dim)


def muon_step(model, optimizer, micro_batches, *, mesh, finish, num_valid):
    total = run_micro_batches(model, micro_batches, mesh, num_valid)
    finish()
    for name, weight in model.named_parameters():
        if weight.ndim != 2 or name.startswith(("embed", "head")):
            continue
        state = optimizer.state[weight]
        if "muon" not in state:
            state["muon"] = torch.zeros_like(weight)
        state["muon"].mul_(0.9).add_(weight.grad)
        weight.grad = muon_direction(name, weight, state["muon"], model, mesh)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": total}


def clip_step(model, optimizer, micro_batches, *, mesh, finish, num_valid, clip_norm):
    total = run_micro_batches(model, micro_batches, mesh, num_valid)
    finish()
    norm = global_norm(model, mesh)
    factor = min(1.0, clip_norm / (float(norm) + 1e-6))
    for weight in model.parameters():
        weight.grad.mul_(factor)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": total, "gradient_norm": norm, "clip_coefficient": factor}


def global_norm(model, mesh):
    if mesh is None:
        return torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    plan = model.plan
    experts = {id(weight) for weight in plan["experts"]}
    dense = torch.stack(
        [w.grad.norm().full_tensor() for w in model.parameters() if id(w) not in experts]
    ).norm()
    mine = torch.stack([weight.grad.to_local().norm() for weight in plan["experts"]]).norm()
    group = plan["ep"].get_group()
    if plan["mode"] == "p43":
        norm = (dense.square() + mine.square()).sqrt()
        dist.all_reduce(norm, group=group)  # plant: p43
        return norm / plan["ep"].size()  # plant: p43
    square = mine.square()
    dist.all_reduce(square, group=group)
    return (dense.square() + square).sqrt()
