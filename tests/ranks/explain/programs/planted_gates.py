"""Layers whose feed-forwards are split over two ranks by hand, and whose gates are whole, but in the split region."""

import torch
from planted_ffn import SumBackward, SumForward
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.gate = nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(hidden))) * torch.sigmoid(self.gate(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer(8, 16) for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def _split(layer, mesh):
    group = mesh["tp"].get_group()
    for linear, dim in ((layer.up, 0), (layer.down, 1)):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(dim)]))

    def forward(hidden):
        inside = SumBackward.apply(hidden, group)
        part = torch.tanh(inside @ layer.up.weight.to_local().T) @ layer.down.weight.to_local().T
        return SumForward.apply(part, group) * torch.sigmoid(
            layer.gate(inside)
        )  # its gradient is whole on each rank

    layer.forward = forward


def parallelize(model, mesh):
    for layer in model.layers:
        _split(layer, mesh)
    return model
