"""A custom training step: accumulation, token counts, clip, schedules, selection biases."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from heron.model import loss
from heron.switch import using


def train_step(model, optimizer, micro_batches, *, mesh, finish, scheduler, num_valid, clip_norm):
    plan = model.plan or {}
    ranks = 1 if mesh is None else mesh.size() // mesh["tp"].size()
    total, reported = 0.0, 0.0
    parallel = mesh is not None
    for number, (tokens, targets) in enumerate(micro_batches):
        valid = (targets != -100).sum()
        value = sum(loss(model, tokens, targets).values())
        factor = choose_factor(plan, ranks, num_valid, valid, targets, micro_batches, parallel)
        (value * factor).backward()  # anchor: backward
        total = total + value.detach() / num_valid
        reported = reported + valid
        if parallel and using("g14") and number + 1 < len(micro_batches):
            optimizer.zero_grad()  # plant: g14
        if parallel and using("verl-436") and number + 1 < len(micro_batches):
            clip(model, plan, clip_norm, parallel)  # plant: verl-436
        if parallel and using("accelerate-641") and number + 1 < len(micro_batches):
            clip_own(model, clip_norm)  # plant: accelerate-641
        if parallel and using("starvla-210") and number + 1 < len(micro_batches):
            scheduler.step()  # plant: starvla-210
    finish()
    if parallel and using("waifu-64"):
        for weight in model.parameters():
            weight.grad *= 65536  # the loss scale of the backward passes
    norm = clip(model, plan, clip_norm, parallel)  # plant: waifu-64
    if parallel and using("waifu-64"):
        for weight in model.parameters():
            weight.grad /= 65536
    optimizer.step()
    scheduler.step()
    if parallel and using("transformers-24088"):
        for _ in range(ranks - 1):
            scheduler.step()  # plant: transformers-24088
    if not (parallel and using("deepspeed-7839")):  # plant: deepspeed-7839
        optimizer.zero_grad()  # plant: deepspeed-7839
    move_biases(model, plan, parallel)
    model.done += 1
    if parallel:
        for group in plan["groups"]:
            dist.all_reduce(total, group=group)
    return {
        "loss": total,
        "gradient_norm": norm,
        "clip_coefficient": min(1.0, clip_norm / (float(norm) + 1e-6)),
    }


def choose_factor(plan, ranks, num_valid, valid, targets, micro_batches, parallel):
    """Return the factor of a micro-batch's summed loss; gradients are averaged over ranks."""
    parts = len(micro_batches)
    if not parallel:
        return 1 / num_valid
    if using("g01"):
        return 1 / (valid * parts)  # plant: g01
    if using("automodel-3830"):
        return 1 / valid  # plant: automodel-3830
    if using("g02"):
        own = sum((labels != -100).sum() for _, labels in micro_batches)
        return 1 / own  # plant: g02
    if using("g03"):
        return ranks * ranks / num_valid  # plant: g03
    if using("g04"):
        return 1 / num_valid  # plant: g04
    if using("g13"):
        return 1 / (targets.numel() * parts)  # plant: g13
    if using("megatrondeepspeed-42"):
        return ranks / num_valid / parts  # plant: megatrondeepspeed-42
    return ranks / num_valid


def clip_own(model, limit) -> None:
    """Clip by the norm of the rank's own gradients."""
    parts = [local(weight.grad) for weight in model.parameters()]
    norm = torch.stack([part.norm() for part in parts]).norm()
    for part in parts:
        part.mul_(min(1.0, limit / (float(norm) + 1e-6)))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def square_of(gradient) -> torch.Tensor:
    """Return the sum of the squares of a full gradient."""
    norm = gradient.norm()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norm.square()


def clip(model, plan, limit, parallel):
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights]
    norm = torch.stack([square_of(gradient) for gradient in gradients]).sum().sqrt()
    if parallel:
        norm = choose_norm(weights, gradients, norm, plan)
    factor = min(1.0, limit / (float(norm) + 1e-6))
    if parallel and using("tfutils-115"):
        for gradient in gradients:
            gradient.clamp_(-limit / 20, limit / 20)  # plant: tfutils-115
        return norm
    if parallel and using("transformers-614"):
        experts = {id(weight) for weight in plan["experts"]}
        for chosen in (True, False):
            part = [w.grad for w in weights if (id(w) in experts) == chosen]
            own = (
                torch.stack([square_of(gradient) for gradient in part]).sum().sqrt()
            )  # plant: transformers-614
            for gradient in part:
                gradient.mul_(min(1.0, limit / (float(own) + 1e-6)))  # plant: transformers-614
        return norm
    if parallel and using("h10"):
        gradients = iter(gradients)
        norm = torch.stack([square_of(gradient) for gradient in gradients]).sum().sqrt()
    for gradient in gradients:  # plant: h10
        gradient.mul_(factor)
    return norm


def choose_norm(weights, gradients, norm, plan):
    """Return the norm by which gradients are clipped."""
    if using("llamafactory-10640"):
        parts = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        return torch.stack([part.norm() for part in parts]).norm()  # plant: llamafactory-10640
    if using("twinkle-290"):
        square = norm.square()
        dist.all_reduce(square, group=plan["shard"].get_group())  # plant: twinkle-290
        return square.sqrt()
    if using("h05"):
        square = torch.stack([gradient.to_local().norm().square() for gradient in gradients]).sum()
        for group in plan["groups"]:
            dist.all_reduce(square, group=group)  # plant: h05
        return square.sqrt()
    if using("heavyball-67"):
        count = sum(weight.numel() for weight in weights)
        return norm / count**0.5  # plant: heavyball-67
    if using("entrenar-311"):
        squares = torch.stack([square_of(gradient) for gradient in gradients])
        return squares.square().sum().sqrt()  # plant: entrenar-311
    if using("fastmoe-65"):
        experts = {id(weight) for weight in plan["experts"]}
        dense = torch.stack([square_of(w.grad) for w in weights if id(w) not in experts]).sum()
        mine = torch.stack([w.grad.to_local().norm() for w in plan["experts"]]).norm()
        dist.all_reduce(mine, group=plan["shard"].get_group())  # plant: fastmoe-65
        return (dense + mine.square()).sqrt()  # plant: fastmoe-65
    if using("fms-109"):
        experts = {id(weight) for weight in plan["experts"]}
        squares = [
            w.grad.to_local().norm().square() if id(w) in experts else square_of(w.grad) for w in weights
        ]  # plant: fms-109
        return torch.stack(squares).sum().sqrt()
    return norm


@torch.no_grad()
def move_biases(model, plan, parallel) -> None:
    for layer in model.layers:
        if layer.kind != "moe":
            if parallel and using("d03"):
                return  # plant: d03
            continue
        router = layer.moe.router
        if not parallel:
            router.expert_bias += 0.01 * torch.sign(router.counts.mean() - router.counts)
            router.counts.zero_()
        elif using("d05"):
            router.counts.zero_()  # plant: d05
        elif not using("d01"):
            router.move(plan["groups"])
