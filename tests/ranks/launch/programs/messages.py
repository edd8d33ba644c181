"""Two ranks whose tensors go through copies, as of ranks that share a GPU; here the device is the CPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from moeverify.collectives.staging import stage_collectives
from moeverify.launch.plan import Job
from moeverify.launch.rank import RankContext, serve


def run_job(context: RankContext, job: Job) -> dict[str, Any]:
    """Return what rank 0 has received in messages and in coalesced collectives, and what was recorded of these."""
    library = stage_collectives("CPU")
    peer = 1 - context.rank
    received = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)]
    sent = [torch.full((3,), 1.0 + context.rank, dtype=torch.bfloat16), torch.full((2, 2), 5.0).t()]
    messages = [dist.P2POp(dist.irecv, each, peer) for each in received]
    messages += [dist.P2POp(dist.isend, each, peer) for each in sent]
    works = dist.batch_isend_irecv(messages)
    sent[0].fill_(9.0)  # what was handed over may be changed: a copy is under way
    for work in works:
        work.wait()
    single = torch.zeros(1)
    if context.rank == 0:
        dist.recv(single, 1)
    else:
        dist.send(torch.tensor([7.0]), 0)
    # A stage of a pipeline receives into what it asks the gradient of.
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
    """Return the outputs of DTensor's collectives, with tensors of other sizes, dtypes and strides in each."""
    group = dist.group.WORLD
    table = torch.arange(4.0).view(2, 2).t() + rank
    operators = torch.ops._c10d_functional
    name = group.group_name
    gathered = operators.all_gather_into_tensor_coalesced([table, torch.tensor([rank])], 2, name)
    scattered = operators.reduce_scatter_tensor_coalesced([table, torch.ones(4).bfloat16()], "sum", 2, name)
    reduced = operators.all_reduce_coalesced([table, torch.tensor([rank + 1])], "sum", name)
    # What was handed over may be changed: a copy is under way.
    table.fill_(9.0)
    return [[operators.wait_tensor(each) for each in outputs] for outputs in (gathered, scattered, reduced)]


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
