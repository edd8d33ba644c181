"""The jobs of the launch tests: a payload's `do` names the function, its `rank` the rank that misbehaves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import RankContext, serve


def add(context: RankContext, job: Job) -> dict[str, Any]:
    total = torch.tensor([float(context.rank + 1)], device=context.device)
    dist.all_reduce(total)
    pids: list[Any] = [None] * context.world_size
    dist.all_gather_object(pids, os.getpid())
    context.report(f"{job.name} added")
    if context.rank == job.payload.get("retires"):
        context.retire()
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
    sys.stdout.write(f"rank {context.rank} adds\n")
    return {"total": total.item(), "pids": pids, "threads": torch.get_num_threads()}


def reduce_in_time(context: RankContext) -> None:
    """Enter an all-reduce and let the rank that misbehaves go on."""
    work = dist.all_reduce(torch.ones(2, device=context.device), async_op=True)
    dist.distributed_c10d._get_default_store().set("the peer is in all_reduce", "")
    work.wait()


def let_the_peer_reduce() -> None:
    """Wait until the peer is in `reduce_in_time`: on a busy machine it may not have entered the job yet."""
    dist.distributed_c10d._get_default_store().wait(["the peer is in all_reduce"])


def fail(context: RankContext, job: Job) -> None:
    if context.rank == job.payload["rank"]:
        let_the_peer_reduce()
        raise ArithmeticError("the sum does not add up\nand more")
    reduce_in_time(context)


def fail_among_sleepers(context: RankContext, job: Job) -> None:
    if context.rank == job.payload["rank"]:
        raise ArithmeticError("the sum does not add up")
    time.sleep(1000)


def leave_among_sleepers(context: RankContext, job: Job) -> None:
    if context.rank == job.payload["rank"]:
        os._exit(0)
    time.sleep(1000)


def disguise(context: RankContext, job: Job) -> None:
    if context.rank == job.payload["rank"]:
        raise ArithmeticError("the origin")
    try:
        dist.all_reduce(torch.ones(2, device=context.device))
    except RuntimeError:
        raise ValueError("a consequence that does not look like one") from None


def leave_first(context: RankContext, job: Job) -> None:
    """End rank 1 while rank 0 still has a message for it."""
    if context.rank == 0:
        time.sleep(0.5)
        dist.isend(torch.ones(2, device=context.device), 1)


def return_a_tensor(context: RankContext, job: Job) -> dict[str, Any]:
    return {"tensor": torch.ones(1)}


def die(context: RankContext, job: Job) -> None:
    dist.all_reduce(torch.ones(3, device=context.device))
    if context.rank == job.payload["rank"]:
        let_the_peer_reduce()
        os.kill(os.getpid(), getattr(signal, job.payload["signal"]))
    reduce_in_time(context)


def crash(context: RankContext, job: Job) -> None:
    if context.rank == job.payload["rank"]:
        sys.stderr.write("about to crash\n")
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(2, device=context.device))


def leave(context: RankContext, job: Job) -> None:
    if context.rank == job.payload["rank"]:
        sys.stderr.write("farewell\n")
        os._exit(7)
    dist.all_reduce(torch.ones(2, device=context.device))


def stay_away(context: RankContext, job: Job) -> None:
    dist.all_reduce(torch.ones(3, device=context.device))
    if context.rank == job.payload["rank"]:
        time.sleep(1000)
    dist.all_reduce(torch.ones(2, device=context.device))


def hold_the_lock(context: RankContext, job: Job) -> None:
    if context.rank == job.payload["rank"]:
        ctypes.PyDLL(None).sleep(1000)
    dist.all_reduce(torch.ones(2, device=context.device))


def freeze(context: RankContext, job: Job) -> None:
    if context.rank == job.payload["rank"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2, device=context.device))


def sleep(context: RankContext, job: Job) -> None:
    time.sleep(1000)


def pause(context: RankContext, job: Job) -> None:
    time.sleep(job.payload["seconds"])


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    function = globals()[job.payload.get("do", "add")]
    result: dict[str, Any] | None = function(context, job)
    return result


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
