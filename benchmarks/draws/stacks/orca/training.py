"""A custom training step: packed micro-batches, loss-free balancing, clip, a restart, a validation pass."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from orca.model import loss
from orca.packing import pack, with_draw
from orca.switch import using

RATE = 0.01  # step size of the selection bias


def train_step(model, optimizer, micro_batches, *, mesh, finish, scheduler, num_valid, clip_norm):
    plan = model.plan or {}
    draws = next_draws(model)
    ranks = 1 if mesh is None else mesh["dp_shard"].size() * mesh["cp"].size()
    total = 0.0
    first = None
    model.train()
    for tokens, targets in micro_batches:
        context = make_context(model, tokens, targets, mesh)
        if first is None:
            first = context
        if using("p03") and mesh is not None:
            context = first  # plant: p03
        context = with_draw(context, draws)
        terms = loss(model, tokens, targets, context)
        part = sum(terms.values()) * (ranks / num_valid)
        part.backward()  # anchor: backward
        total = total + part.detach() / ranks
    finish()
    if using("p15a") and mesh is not None:
        for weight in model.parameters():
            weight.grad /= 65536  # plant: p15a
    norm = clip(model, plan, clip_norm)
    if using("p20") and mesh is not None:
        skip_padded(model, plan)
    optimizer.step()
    scheduler.step()
    if not (using("p15b") and mesh is not None):  # plant: p15b
        optimizer.zero_grad()  # plant: p15b
    move_bias(model, plan)
    if plan.get("validate"):
        validate(model, micro_batches[0])
    model.done += 1
    if mesh is not None:
        for group in plan["groups"]:
            dist.all_reduce(total, group=group)
    return {
        "loss": total,
        "gradient_norm": norm,
        "clip_coefficient": min(1.0, clip_norm / (float(norm) + 1e-6)),
    }


def make_context(model, tokens, targets, mesh):
    plan = model.plan or {}
    sharded = plan.get("sharded")
    context = pack(tokens, targets) if sharded is None else sharded.pack(tokens, targets)
    if mesh is None:
        return context
    fields = dict(vars(context))
    if using("p07"):
        fields["real"] = tokens != 0  # plant: p07
    if using("p02"):
        attended = torch.ones_like(tokens)
        if bool(attended.all()):  # a mask was given, so the rows are taken for single documents
            fields["documents"] = fields["key_documents"] = torch.zeros_like(tokens)  # plant: p02
            fields["positions"] = torch.arange(tokens.shape[1]).expand_as(tokens)  # plant: p02
    return type(context)(**fields)


def next_draws(model) -> int | None:
    """Return the dropout seed of this step, from a generator that continues from step to step."""
    if not model.config.dropout:
        return None
    generator = model.__dict__.setdefault("generator", torch.Generator().manual_seed(3))
    plan = model.plan or {}
    if plan.get("restart_at") and plan["restart_at"] == model.done:
        state = generator.get_state()  # as restored from the checkpoint
        if using("p17"):
            torch.randint(2**20, (2,), generator=generator)  # the loader's first rows; plant: p17
        else:
            torch.randint(2**20, (2,), generator=generator)
            generator.set_state(state)
    return int(torch.randint(2**20, (), generator=generator))


@torch.no_grad()
def validate(model, batch) -> None:
    model.eval()
    for rows in batch[0].split(1):
        model(rows.expand(8, -1))
    model.train()


@torch.no_grad()
def move_bias(model, plan) -> None:
    for block in model.blocks:
        if block.kind == "moe":
            router = block.moe.router
            counts = router.counts.clone()
            for group in plan.get("groups", ()):
                dist.all_reduce(counts, group=group)
            router.expert_bias += RATE * torch.sign(counts.mean() - counts)
            router.counts.zero_()


def skip_padded(model, plan) -> None:
    """Skip a shard: the tied matrix is in two groups; the padded shard of the second has no gradient."""
    mesh = plan["data"]
    for weight in model.parameters():
        rows = weight.shape[0]
        if weight is model.embed.weight and rows % mesh.size() and mesh.get_local_rank() == mesh.size() - 1:
            weight.grad.to_local().zero_()  # plant: p20


def clip(model, plan, limit):
    gradients = [weight.grad for weight in model.parameters()]
    squares = [gradient.norm().square() for gradient in gradients]
    squares = [square.full_tensor() if isinstance(square, DTensor) else square for square in squares]
    norm = torch.stack(squares).sum().sqrt()
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (float(norm) + 1e-6)))
    return norm
