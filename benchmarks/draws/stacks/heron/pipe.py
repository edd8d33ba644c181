"""A pipeline of two stages over the ranks of `tp`, by torch's schedules."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

from heron import switch
from heron.model import Decoder
from heron.switch import using


class Stage(nn.Module):
    """One rank's part of the decoder."""

    def __init__(self, model: Decoder, first: bool, last: bool, layers: range) -> None:
        super().__init__()
        self.tok_embeddings = model.tok_embeddings if first else None
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in layers})
        self.norm = model.norm if last else None
        self.output = model.output if last else None
        self.plan, self.done, self.config = None, 0, model.config

    def forward(self, x):
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)[0]
        return x if self.output is None else self.output(self.norm(x))


def stages(model: Decoder, mesh, *, mode="", tied=False):
    switch.choose(mode)
    axis = mesh["tp"]
    rank, count = axis.get_local_rank(), len(model.layers)
    half = count // axis.size()
    start = rank * half
    stop = start + half
    if using("mlxlm-1688"):
        stop = start + max(1, half - 1) if rank == 0 else stop  # plant: mlxlm-1688
    if tied:
        model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    made = Stage(model, rank == 0, rank == axis.size() - 1, range(start, stop))
    made.plan = {"mode": mode, "axis": axis, "group": axis.get_group(), "rank": rank, "tied": tied}
    return made


def pipe_step(model, optimizer, micro_batches, *, mesh, num_valid, clip_norm):
    if mesh is None:
        total = run_whole(model, micro_batches, num_valid)
        norm = torch.stack([w.grad.norm() for w in model.parameters()]).norm()
    else:
        total = run_schedule(model, micro_batches, num_valid)
        finish(model)
        norm = find_norm(model)
    for weight in model.parameters():
        weight.grad.mul_(min(1.0, clip_norm / (float(norm) + 1e-6)))
    optimizer.step()
    optimizer.zero_grad()
    return {
        "loss": total,
        "gradient_norm": norm,
        "clip_coefficient": min(1.0, clip_norm / (float(norm) + 1e-6)),
    }


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def run_whole(model, micro_batches, num_valid):
    total = 0.0
    for tokens, targets in micro_batches:
        part = cross_entropy(model(tokens)[0], targets) / num_valid
        part.backward()
        total = total + part.detach()
    return total


def run_schedule(model, micro_batches, num_valid):
    plan = model.plan
    parts = len(micro_batches)

    def criterion(logits, targets):
        value = cross_entropy(logits, targets)
        if using("l02"):
            return value  # plant: l02
        if using("deepspeed-8154"):
            return value / num_valid / parts  # plant: deepspeed-8154
        return value / num_valid

    stage = PipelineStage(model, plan["rank"], 2, torch.device("cpu"), group=plan["group"])
    scaled = using("l03")
    schedule = ScheduleGPipe(stage, parts, loss_fn=criterion, scale_grads=scaled)  # plant: l03
    tokens = torch.cat([tokens for tokens, _ in micro_batches])
    targets = torch.cat([targets for _, targets in micro_batches])
    if using("aidotnet-845"):
        tokens = torch.cat([micro_batches[0][0]] * parts)  # plant: aidotnet-845
    losses = []
    if plan["rank"] == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=targets, losses=losses)
    total = (
        torch.stack(losses).sum().detach()
        if losses
        else torch.zeros((), dtype=next(model.parameters()).dtype)
    )
    dist.all_reduce(total, group=plan["group"])
    if using("l02"):
        total = total / num_valid
    return total


def finish(model) -> None:
    """Complete the gradients that both stages have."""
    plan = model.plan
    if plan["tied"] and not using("speech-6958"):  # plant: speech-6958
        weight = model.tok_embeddings.weight if plan["rank"] == 0 else model.output.weight
        dist.all_reduce(weight.grad, group=plan["group"])  # plant: speech-6958


def find_norm(model):
    plan = model.plan
    squares = []
    for weight in model.parameters():
        is_copy = model.output is not None and weight is model.output.weight and plan["tied"]
        if is_copy and not using("megatron-7227"):  # plant: megatron-7227
            continue  # it belongs to the first stage
        squares.append(weight.grad.norm().square())  # plant: megatron-7227
    square = torch.stack(squares).sum()
    if not using("h06"):  # plant: h06
        dist.all_reduce(square, group=plan["group"])  # plant: h06
    return square.sqrt()
