"""Two ranks that send to each other through copies, as ranks that share a GPU do; here the device is the CPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from moeverify.collectives.staging import stage_messages
from moeverify.launch.plan import Job
from moeverify.launch.rank import RankContext, serve


def run_job(context: RankContext, job: Job) -> dict[str, Any]:
    """Return what rank 0 has received, in two directions at once and in several tensors."""
    library = stage_messages("CPU")
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
    library._destroy()
    after = torch.zeros(1)
    dist.recv(after, 1) if context.rank == 0 else dist.send(torch.tensor([8.0]), 0)
    return {"received": [each.tolist() for each in (*received, single, after)]}


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
