"""Run by every rank: each collective that carries gradients, on tensors with several memory orders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.parallel import collectives
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext

SHAPE = (4, 6, 2, 8)
DIM = 1
ORDERS = {"plain": (0, 1, 2, 3), "channels last": (0, 2, 3, 1), "reversed": (3, 2, 1, 0)}

Whole = Callable[[Sequence[Tensor], int], Tensor]


def lay(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return the same numbers with this order of dims in memory."""
    back = [list(order).index(dim) for dim in range(len(order))]
    return tensor.permute(*order).contiguous().permute(*back)


def draw(rank: int, label: int, shape: Sequence[int]) -> Tensor:
    """Return whole numbers, whose sums are exact in any order, and which any rank can reproduce."""
    generator = torch.Generator().manual_seed(100 * rank + label)
    return torch.randint(-99, 99, tuple(shape), generator=generator).double()


def part(tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
    return tensor.chunk(num_ranks, dim=DIM)[rank]


# The output of each on a rank, from all inputs; and its gradient there, from all incoming gradients.
DEFINITIONS: dict[str, tuple[Whole, Whole]] = {
    "copy_to": (lambda xs, r: xs[r], lambda gs, r: sum(gs, torch.zeros(()))),
    "reduce_from": (lambda xs, r: sum(xs, torch.zeros(())), lambda gs, r: gs[r]),
    "gather_from": (lambda xs, r: torch.cat(tuple(xs), DIM), lambda gs, r: part(gs[r], r, len(gs))),
    "split_to": (lambda xs, r: part(xs[r], r, len(xs)), lambda gs, r: torch.cat(tuple(gs), DIM)),
    "reduce_scatter_from": (
        lambda xs, r: part(sum(xs, torch.zeros(())), r, len(xs)),
        lambda gs, r: torch.cat(tuple(gs), DIM),
    ),
    "all_gather_sum": (
        lambda xs, r: torch.cat(tuple(xs), DIM),
        lambda gs, r: part(sum(gs, torch.zeros(())), r, len(gs)),
    ),
}


def compare(name: str, order: Sequence[int], rank: int, num_ranks: int) -> list[str]:
    """Return whether output or gradient differ from the definition."""
    group = dist.group.WORLD
    arguments = () if name in ("copy_to", "reduce_from") else (DIM,)
    forward, backward = DEFINITIONS[name]
    inputs = [draw(r, 0, SHAPE) for r in range(num_ranks)]
    x = lay(inputs[rank], order).requires_grad_()
    y = getattr(collectives, name)(x, *arguments, group)
    incoming = [draw(r, 1, y.shape) for r in range(num_ranks)]
    (gradient,) = torch.autograd.grad(y, x, lay(incoming[rank], order))
    right = {
        "output": torch.equal(y, forward(inputs, rank)),
        "gradient": torch.equal(gradient, backward(incoming, rank)),
    }
    return [label for label, is_right in right.items() if not is_right]


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Return on rank 0 the errors of all ranks, by collective and memory order."""
    found = {
        f"{name}, {label}": compare(name, order, context.rank, context.world_size)
        for name in DEFINITIONS
        for label, order in ORDERS.items()
    }
    everything: list[Any] = [None] * context.world_size
    dist.all_gather_object(everything, found)
    return {title: [part[title] for part in everything] for title in found} if context.rank == 0 else None


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
