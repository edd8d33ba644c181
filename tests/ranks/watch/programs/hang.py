"""Two ranks that hang or end early, each time in another way: `python hang.py FOLDER KIND...`."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def opposite(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for step in range(3):
        if step == 2 and rank == 1:
            dist.all_reduce(torch.ones(2), group=groups[1])  # second
        dist.all_reduce(torch.ones(2), group=groups[0])  # first
        dist.all_reduce(torch.ones(2), group=groups[1])


def different(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))  # sums
    else:
        dist.barrier()  # meets


def uneven(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(2)).sum()
    if rank == 1:
        time.sleep(1000)  # has no batch
    loss.backward()  # sums gradients


def unreceived(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(2), 1)  # never sent
    time.sleep(1000)  # sends nothing


def raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has no data")
    dist.all_reduce(torch.ones(2))  # waits for the failed


def holds_lock(rank: int) -> None:
    if rank == 1:
        mutex = ctypes.create_string_buffer(64)
        lock = ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)  # no signal interrupts it
    dist.all_reduce(torch.ones(2))  # waits for the lock


def stops(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))  # waits for the stopped


def run(kind: str, rank: int, store: Path) -> None:
    with (store.parent / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.barrier()
    globals()[kind](rank)
    dist.destroy_process_group()


def main(folder: Path, kinds: list[str]) -> int:
    """Run two ranks of each kind until they end or a file `next-KIND` is there; return the last exit status."""
    status = 0
    context = multiprocessing.get_context("fork")
    for kind in kinds:
        ranks = [context.Process(target=run, args=(kind, rank, folder / kind)) for rank in range(2)]
        for each in ranks:
            each.start()
        while any(each.is_alive() for each in ranks) and not (folder / f"next-{kind}").exists():
            time.sleep(0.02)
        for each in ranks:
            each.kill()
            each.join()
        status = max(each.exitcode or 0 for each in ranks)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
