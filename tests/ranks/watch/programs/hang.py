"""Two ranks that hang or end early, each in its own way: `python hang.py KIND`, by itself or under torchrun."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def missing(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)  # skips the collective
    dist.all_reduce(torch.ones(2))  # waits for rank 1


def opposite(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for step in range(3):
        if step == 2 and rank == 1:
            dist.all_reduce(torch.ones(2), group=groups[1])  # second first
        dist.all_reduce(torch.ones(2), group=groups[0])  # first
        dist.all_reduce(torch.ones(2), group=groups[1])


def different(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))  # sums
    else:
        dist.barrier()  # only meets


def groups(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    # Every rank makes both groups; the second one has rank 1 only in the mind of its author.
    pair, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.broadcast(torch.ones(2), 0, group=pair if rank == 0 else other)


def unreceived(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(2), 1)  # never sent
    time.sleep(1000)  # sends nothing


def raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has no data")
    dist.all_reduce(torch.ones(2))  # waits for rank 1


def leaves(rank: int) -> None:
    if rank == 1:
        sys.exit(0)
    dist.all_reduce(torch.ones(2))  # waits for rank 1


def dies(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))  # waits for rank 1


def holds_lock(rank: int) -> None:
    if rank == 1:
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # a second lock waits for ever, and no signal interrupts it
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    dist.all_reduce(torch.ones(2))  # waits for rank 1


def stops(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))  # waits for rank 1


def times_out(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(2), group=group)
    if rank == 1:
        time.sleep(8)
    dist.all_reduce(torch.ones(2), group=group)  # waits for rank 1


def fails_alone(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        raise SystemExit(5)


def goes_on(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        time.sleep(4)  # slow, not stuck
    dist.barrier()  # waits for rank 1


def run(kind: str, rank: int, store: str) -> None:
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    dist.barrier()
    globals()[kind](rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run(sys.argv[1], int(os.environ["RANK"]), "")
        sys.exit()
    context = multiprocessing.get_context("fork")
    store = Path(sys.argv[2]) / "store"
    ranks = [context.Process(target=run, args=(sys.argv[1], rank, str(store))) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(abs(each.exitcode or 0) for each in ranks))
