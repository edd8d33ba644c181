"""crowd.py N: forks N ranks, which stop at the same line; rank 37 holds another value."""
# ruff: noqa: T201  # a program of the tests: what it prints is compared

import multiprocessing
import os
import sys

from multiprocessing_pdb import MultiprocessingPdb
from multiprocessing_pdb.rank.debugger import load_pdb

Tra = MultiprocessingPdb().set_trace


def work(rank, world):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    loss = float("nan") if rank == 37 else 3.14
    Tra()
    return loss


if __name__ == "__main__":
    world = int(sys.argv[1])
    load_pdb()  # once for all ranks: importing pdbpp 64 times takes most of a minute on two cores
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, world)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    print("codes", sum(process.exitcode for process in ranks))
