"""Jobs that return the collectives in rank 0's trace: one function for each way to issue them."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import RankContext, serve


def call_plain(context: RankContext) -> None:
    half, whole = torch.ones(2), torch.ones(4)
    dist.all_reduce(half)
    dist.all_gather_into_tensor(whole, half)
    dist.reduce_scatter_tensor(half, whole)
    dist.all_to_all_single(torch.empty(4), whole)
    dist.broadcast(half, src=1)
    dist.barrier()
    dist.all_gather([torch.empty(2), torch.empty(2)], half)
    dist.all_reduce(whole, async_op=True).wait()


def call_point_to_point(context: RankContext) -> None:
    if context.rank == 0:
        dist.send(torch.ones(3), dst=1)
        dist.recv(torch.ones(3), src=1)
    else:
        dist.recv(torch.ones(3), src=0)
        dist.send(torch.ones(3), dst=0)


def call_objects(context: RankContext) -> None:
    dist.all_gather_object([None, None], {"rank": context.rank})


def call_functional(context: RankContext) -> None:
    functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).wait()
    functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, dist.group.WORLD).wait()
    functional.all_to_all_single_autograd(torch.ones(4), None, None, dist.group.WORLD).wait()


def call_dtensor(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    context.trace.reset()
    sharded.redistribute(mesh, [Replicate()]).to_local()


def train(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def call_fsdp(context: RankContext) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    context.trace.reset()
    train(model)


def call_ddp(context: RankContext) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    context.trace.reset()
    train(model)


def call_in_inference(context: RankContext) -> None:
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))


def call_in_subgroups(context: RankContext) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    context.trace.reset()
    dist.all_reduce(torch.ones(1), group=groups[context.rank])
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))


def wait_for_end(trace: CollectiveTrace) -> list[dict[str, Any]]:
    """Return the records when all have ended: a backend may mark a work after its waiter continues."""
    for _ in range(500):
        if all(record.state != "started" for record in trace.records()):
            break
        time.sleep(0.01)
    return [record.model_dump(mode="json") for record in trace.records()]


def run_job(context: RankContext, job: Job) -> dict[str, Any]:
    globals()[job.name](context)
    mine = wait_for_end(context.trace)
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, mine)
    return {"records": everyone}


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
