"""Models and functions that a user might name: right ones, and one of each kind of mistake."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from moeverify.train.engine import PlainEngine


class Small(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 32)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("aside", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.embed(tokens))) + self.turns.imag.sum()


def make(dropout: float = 0.0) -> Small:
    return Small(dropout)


def make_nothing() -> int:
    return 3


def make_failing() -> Small:
    raise ValueError("the weights are gone")


class Narrow(Small):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)[:, 0]


def sum_tokens(model, tokens, targets):
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")


def sum_unless_fsdp2(model, tokens, targets):
    if isinstance(model, FSDPModule):
        raise TypeError("this is FSDP2")
    return sum_tokens(model, tokens, targets)


def each_token(model, tokens, targets):
    logits = model(tokens).mT
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")


def mean_tokens(model, tokens, targets):
    return sum_tokens(model, tokens, targets) / (targets != -100).sum()


def name_terms(model, tokens, targets):
    logits = model(tokens)
    cross_entropy = nn.functional.cross_entropy(logits.mT, targets, ignore_index=-100, reduction="sum")
    largest = torch.logsumexp(logits, dim=-1).square()[targets != -100].sum()
    # Wrong under a layout: the addend of the loss on each rank is added twice.
    return {"ce": cross_entropy, "spread": 0.01 * getattr(model, "num_counts", 1) * largest}


def shard_and_count(model, mesh):
    fully_shard(model, mesh=mesh["dp_shard"])
    model.num_counts = 2
    return model


def shard_blocks(model, mesh):
    for block in model.layers.values():
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


def forget_to_shard(model, mesh):
    return model


def return_nothing(model, mesh):
    fully_shard(model, mesh=mesh["dp_shard"])


def shard_and_change_settings(model, mesh):
    """Shard the model, and leave a setting behind that a second run of the layout would see."""
    fully_shard(model, mesh=mesh["dp_shard"])
    torch.set_default_dtype(torch.bfloat16)
    return model


def halve_at_the_end(model, mesh):
    """Halve every step's gradients by mistake, in the function that may complete them."""
    fully_shard(model, mesh=mesh["dp_shard"])

    def finish() -> None:
        for parameter in model.parameters():
            parameter.grad /= 2

    return model, finish


def make_in_group() -> Small:
    """Make a model like frameworks that set up their groups first: every rank of the world must take part."""
    group = dist.new_group(range(dist.get_world_size()))
    dist.barrier(group)
    return Small()


class Experts(nn.Module):
    """A layer that sends every token to both experts and adds their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.experts = nn.ModuleDict({str(number): nn.Linear(8, 8) for number in range(2)})
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(sum(expert(hidden) for expert in self.experts.values()))


class RoundedExperts(Experts):
    """A layer that combines the experts' outputs in float32, as several frameworks do."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        combined = sum(expert(hidden) for expert in self.experts.values())
        return self.head(combined.float().to(hidden.dtype))


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(context, output, group):
        total = output.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden, group):
        context.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=context.group)
        return total, None


def keep_one_expert(model, mesh):
    """Keep this rank's expert as a plain tensor, which no other rank has."""
    group, rank = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
    del model.experts[str(1 - rank)]
    expert = model.experts[str(rank)]
    inner = expert.forward
    expert.forward = lambda hidden: _SumForward.apply(inner(_SumBackward.apply(hidden, group)), group)
    return model


def keep_one_rounded_expert(model, mesh):
    """Round each rank's part of the sum to float32 instead of the sum."""
    keep_one_expert(model, mesh)
    (expert,) = model.experts.values()
    group, inner = mesh["tp"].get_group(), nn.Linear.forward

    def forward(hidden):
        part = inner(expert, _SumBackward.apply(hidden, group))
        return _SumForward.apply(part.float(), group).to(part.dtype)

    expert.forward = forward
    return model


def keep_own_gradients(model, mesh):
    """Move gradients into `main_grad`, as Megatron does, without declaring it."""

    def move(parameter: nn.Parameter) -> None:
        parameter.main_grad = getattr(parameter, "main_grad", 0) + parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    return model


def forget_to_reduce(model, mesh):
    """Shard with FSDP2, and keep the head's reduction off in all micro-batches, including the last."""
    fully_shard(model.head, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    model.head.set_requires_gradient_sync(False)
    return model


class MainGradients(PlainEngine):
    """Gradients that accumulate in `main_grad` and are averaged over all ranks."""

    def zero_grad(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.main_grad = 0

    def gradient(self, shard):
        dist.all_reduce(shard.tensor.main_grad, op=dist.ReduceOp.SUM)
        shard.tensor.main_grad /= dist.get_world_size()
        return shard.tensor.main_grad

    def norm(self):
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        return torch.stack([each.main_grad.norm() for each in parameters]).norm()

    def clip(self, shards, norm, max_norm):
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for shard in shards:
            shard.tensor.main_grad *= coefficient
        return coefficient

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.main_grad
        super().step()
        self.optimizer.zero_grad()


def main_gradients(model, mesh):
    return keep_own_gradients(model, mesh), MainGradients()


number = 3
