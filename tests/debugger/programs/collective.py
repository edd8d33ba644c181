"""collective.py MODE arm|hold|plain [apart]: one of two gloo ranks stops for longer than their timeout, 6 s.

MODE "later": rank 1 begins its collective after it could learn of the stop. MODE "flight": before.
"""
# ruff: noqa: T201  # a program of the tests: what it prints is compared

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import multiprocessing_pdb
from multiprocessing_pdb import MultiprocessingPdb
from multiprocessing_pdb.rank.monitor import wait_until_raised
from multiprocessing_pdb.rank.process_state import PROCESS

Tra = MultiprocessingPdb().set_trace
LIMIT = 6.0


def read_limit():
    """Return the current timeouts of the default group and of the second group."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def run(mode, arming):
    rank = dist.get_rank()
    value = torch.ones(4) * (rank + 1)
    dist.barrier()
    if rank == 0:
        if mode == "flight":
            time.sleep(1.0)  # rank 1 is in its collective by now
        Tra(header="long stop")
        assert arming == "hold" or read_limit() == [LIMIT, LIMIT], read_limit()
    elif mode == "later" and arming == "arm":
        assert wait_until_raised(60), "rank 1 never learned of the stop"
        assert min(read_limit()) > LIMIT
    elif mode == "later":
        time.sleep(1.5)
    print("begin", rank, flush=True)
    dist.all_reduce(value)
    print(f"sum {value.tolist()}\n", end="", flush=True)  # one write: two ranks share a file
    if arming == "arm":
        deadline = time.monotonic() + 30
        while PROCESS.timeouts.are_raised() and time.monotonic() < deadline:
            time.sleep(0.05)
        print(f"restored {read_limit()}\n", end="", flush=True)
    dist.barrier()


if __name__ == "__main__":
    if "apart" in sys.argv:  # as if each rank had its own node and runtime directory
        os.environ["MPDB_DIR"] += os.environ["RANK"]
        os.environ["MPDB_WATCH"] = "store"
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=120)
    )  # also the timeout of the store: a busy machine is slow
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT))
    dist.new_group([0, 1], timeout=timedelta(seconds=LIMIT))
    if sys.argv[2] != "plain":
        multiprocessing_pdb.arm(hold=sys.argv[2] == "hold")
    run(sys.argv[1], sys.argv[2])
    dist.destroy_process_group()
    print("done\n", end="", flush=True)
