"""Two ranks whose tensors go through copies, as for ranks that share a GPU; here the device is the CPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from moeverify.verification.collectives.staging import stage_collectives
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import RankContext, serve


def run_job(context: RankContext, job: Job) -> dict[str, Any]:
    """Return the values that rank 0 received in messages and coalesced collectives, and their records."""
    library = stage_collectives("CPU")
    peer = 1 - context.rank
    received = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)]
    sent = [torch.full((3,), 1.0 + context.rank, dtype=torch.bfloat16), torch.full((2, 2), 5.0).t()]
    messages = [dist.P2POp(dist.irecv, each, peer) for each in received]
    messages += [dist.P2POp(dist.isend, each, peer) for each in sent]
    works = dist.batch_isend_irecv(messages)
    sent[0].fill_(9.0)  # the caller may change a sent tensor: a copy is in flight
    for work in works:
        work.wait()
    single = torch.zeros(1)
    if context.rank == 0:
        dist.recv(single, 1)
    else:
        dist.send(torch.tensor([7.0]), 0)
    # A pipeline stage receives into a tensor that requires a gradient.
    leaf = torch.zeros(1, requires_grad=True)
    exchange = [dist.P2POp(dist.irecv, leaf, peer), dist.P2POp(dist.isend, torch.tensor([6.0]), peer)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    collectives = _run_coalesced(context.rank)
    recorded = [record.op for record in context.trace.records()[-len(collectives) :]]
    library._destroy()
    after = torch.zeros(1)
    dist.recv(after, 1) if context.rank == 0 else dist.send(torch.tensor([8.0]), 0)
    return {
        "received": [each.tolist() for each in (*received, single, leaf, after)],
        "collectives": [[each.tolist() for each in outputs] for outputs in collectives],
        "recorded": recorded,
    }


def _run_coalesced(rank: int) -> list[list[torch.Tensor]]:
    """Return the outputs of DTensor's collectives, with tensors of different sizes, dtypes and strides."""
    group = dist.group.WORLD
    table = torch.arange(4.0).view(2, 2).t() + rank
    operators = torch.ops._c10d_functional
    name = group.group_name
    gathered = operators.all_gather_into_tensor_coalesced([table, torch.tensor([rank])], 2, name)
    scattered = operators.reduce_scatter_tensor_coalesced([table, torch.ones(4).bfloat16()], "sum", 2, name)
    reduced = operators.all_reduce_coalesced([table, torch.tensor([rank + 1])], "sum", name)
    # The caller may change a sent tensor: a copy is in flight.
    table.fill_(9.0)
    return [[operators.wait_tensor(each) for each in outputs] for outputs in (gathered, scattered, reduced)]


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
