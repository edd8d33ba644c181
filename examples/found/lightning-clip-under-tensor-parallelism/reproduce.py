"""Fabric.clip_gradients by norm under ModelParallelStrategy with tensor parallelism. Needs lightning.

Exits with 1 when the clip raises, or returns another norm than that of one device; with 0 otherwise.
"""

import copy
import sys

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2


def divide(model, mesh):
    """Shard both linear layers; the norm between residuals stays replicated, as usual."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def run(fabric):
    torch.manual_seed(0)
    whole = Block()
    x = torch.randn(4, 8)
    model = fabric.setup_module(copy.deepcopy(whole))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), foreach=False))
    whole(x).square().sum().backward()
    fabric.backward(model(x).square().sum())
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    try:
        actual = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    except RuntimeError as error:
        print(f"rank {fabric.global_rank}: {error}", flush=True)
        sys.exit(1)
    actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
    print(f"rank {fabric.global_rank}: expected {expected:.6f} actual {actual:.6f}", flush=True)
    sys.exit(0 if torch.allclose(actual, expected) else 1)


if __name__ == "__main__":
    strategy = ModelParallelStrategy(divide, data_parallel_size=1, tensor_parallel_size=RANKS)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    if fabric.global_rank == 0:
        print("torch", torch.__version__, "lightning", lightning.__version__, flush=True)
    run(fabric)
