"""A model whose feed-forward is split over two ranks by hand: correct, or wrong at lines marked PLANTED."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

SLOPE = 0.7


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.leaky_relu(self.up(hidden), SLOPE))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.ffn = FeedForward(8, 16)
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made = self.ffn(self.embed(tokens))  # PLANTED missing_gradient_sum: the gradient has parts
        bent = torch.tanh(made)  # PLANTED missing_sum: here ranks have parts
        return self.head(bent)


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(context, part, group):
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden, group):
        context.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=context.group)
        return total, None


def _divide(model, mesh):
    """Give each rank one half of the inner features."""
    ffn = model.ffn
    for linear, dim in ((ffn.up, 0), (ffn.down, 1)):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(dim)]))
    return ffn, mesh["tp"].get_group()


def right(model, mesh):
    ffn, group = _divide(model, mesh)

    def forward(hidden):
        inner = SumBackward.apply(hidden, group) @ ffn.up.weight.to_local().T
        return SumForward.apply(F.leaky_relu(inner, SLOPE) @ ffn.down.weight.to_local().T, group)

    ffn.forward = forward
    return model


def wrong_number(model, mesh):
    ffn, group = _divide(model, mesh)

    def forward(hidden):
        inner = SumBackward.apply(hidden, group) @ ffn.up.weight.to_local().T
        bent = F.leaky_relu(inner, 0.9)  # PLANTED wrong_number
        return SumForward.apply(bent @ ffn.down.weight.to_local().T, group)

    ffn.forward = forward
    return model


def missing_sum(model, mesh):
    ffn, group = _divide(model, mesh)

    def forward(hidden):
        inner = SumBackward.apply(hidden, group) @ ffn.up.weight.to_local().T
        return F.leaky_relu(inner, SLOPE) @ ffn.down.weight.to_local().T

    ffn.forward = forward
    return model


def missing_gradient_sum(model, mesh):
    ffn, group = _divide(model, mesh)

    def forward(hidden):
        inner = hidden @ ffn.up.weight.to_local().T
        return SumForward.apply(F.leaky_relu(inner, SLOPE) @ ffn.down.weight.to_local().T, group)

    ffn.forward = forward
    return model
