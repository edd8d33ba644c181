"""Worker of `moeverify comm`: runs one collective and its backward with torch.distributed.

The launcher runs `python -m moeverify.verification.worker.collective PLAN` in every rank. Imports are
kept to a minimum.

All tensors are one-dimensional float64: the integers in a collective's definition are exact in this dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moeverify.results.collective_name import CollectiveName
from moeverify.results.collective_run import RankOutput, RankTransfer, Transfer, flatten
from moeverify.verification.jobs import CollectiveJob, CollectiveResult, read_job, write_result
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext
from moeverify.verification.launch.world import find_node

# torch 2.13 renamed these two functions and warns about their names in 2.11.
_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Run = Callable[[Tensor, Transfer, RankTransfer], Tensor]


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Run the collective of a job on this rank. Rank 0 returns the values of all ranks."""
    return run_collective(context, job, COLLECTIVES)


def run_collective(
    context: RankContext, job: Job, collectives: Mapping[CollectiveName, tuple[Run, Run]]
) -> dict[str, Any] | None:
    """Run the collective of a job. `collectives` maps its name to the (forward, backward) functions to call.

    Rank 0 returns the values of all ranks; other ranks return an empty result.
    """
    asked = read_job(job.payload)
    assert isinstance(asked, CollectiveJob)
    transfer, mine = asked.transfer, asked.transfer.ranks[context.rank]
    forward, backward = collectives[transfer.collective]
    given = _make_tensor(flatten(mine.input), context.device).requires_grad_(asked.backward)
    output = _Differentiable.apply(given, transfer, mine, forward, backward)  # type: ignore[no-untyped-call]
    if asked.backward:
        output.backward(_make_tensor(flatten(mine.output_gradient), context.device))
    values = RankOutput(
        rank=context.rank,
        host=find_node(),
        output=tuple(output.tolist()),
        input_gradient=None if given.grad is None else tuple(given.grad.tolist()),
    )
    gathered: list[Any] = [None] * context.world_size
    dist.all_gather_object(gathered, values)
    return write_result(CollectiveResult(values=tuple(gathered)) if context.rank == 0 else None)


class _Differentiable(Function):
    """Autograd function of a collective whose backward is another collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer, mine: RankTransfer, there: Run, back: Run) -> Tensor:
        ctx.transfer, ctx.mine, ctx.back = transfer, mine, back
        return there(x, transfer, mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.transfer, ctx.mine), None, None, None, None


def _make_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def _exchange(x: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    out = x.new_empty(sum(mine.receives))
    dist.all_to_all_single(out, x, list(mine.receives), list(mine.sends))
    return out


def _exchange_back(grad: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    out = grad.new_empty(sum(mine.sends))
    dist.all_to_all_single(out, grad, list(mine.sends), list(mine.receives))
    return out


def _gather(x: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    """Return the parts of all ranks, concatenated.

    The collective needs equal sizes, so parts are padded to the largest.
    """
    sizes = _list_sizes(transfer)
    width = max(sizes)
    padded = torch.nn.functional.pad(x, (0, width - len(x)))
    rows = x.new_empty(len(sizes) * width)
    _GATHER(rows, padded)
    return torch.cat([row[:size] for row, size in zip(torch.split(rows, width), sizes, strict=True)])


def _scatter_sum(x: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    """Return this rank's part of the sum over all ranks. Parts are padded to the largest size."""
    sizes = _list_sizes(transfer)
    width = max(sizes)
    padded = [torch.nn.functional.pad(part, (0, width - len(part))) for part in torch.split(x, sizes)]
    row = x.new_empty(width)
    _REDUCE_SCATTER(row, torch.cat(padded))
    return row[: sizes[mine.rank]].clone()


def _list_sizes(transfer: Transfer) -> list[int]:
    """Return the size of each rank's part: its input of an all-gather, or its output of a reduce-scatter."""
    gives = transfer.collective is CollectiveName.ALL_GATHER
    return [sum(rank.sends if gives else rank.receives) for rank in transfer.ranks]


def _sum(x: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def _copy(x: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    out = x.clone()
    dist.broadcast(out, src=transfer.source)
    return out


def _sum_at_source(grad: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    """Return the sum over all ranks on the source rank, and zeros elsewhere (unused there)."""
    total = grad.clone()
    dist.reduce(total, dst=transfer.source)
    return total if mine.rank == transfer.source else torch.zeros_like(total)


COLLECTIVES: Mapping[CollectiveName, tuple[Run, Run]] = {
    CollectiveName.ALL_TO_ALL: (_exchange, _exchange_back),
    CollectiveName.ALL_GATHER: (_gather, _scatter_sum),
    CollectiveName.REDUCE_SCATTER: (_scatter_sum, _gather),
    CollectiveName.ALL_REDUCE: (_sum, _sum),
    CollectiveName.BROADCAST: (_copy, _sum_at_source),
}
"""The (forward, backward) functions of each collective."""


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
