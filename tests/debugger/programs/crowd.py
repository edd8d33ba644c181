"""crowd.py N [MB [FIRST]]: fork N ranks from FIRST on that stop at one line; rank 37's value differs.

Each has an array of MB.
"""
# ruff: noqa: T201  # a program of the tests: what it prints is compared

import multiprocessing
import os
import sys

from multiprocessing_pdb import MultiprocessingPdb
from multiprocessing_pdb.rank.debugger import load_pdb

Tra = MultiprocessingPdb().set_trace


def work(rank, world, size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    if size:
        import numpy

        big = numpy.arange(size << 18, dtype=numpy.float32)
        big[5] = rank == 37
    loss = float("nan") if rank == 37 else 3.14
    Tra()
    return loss


if __name__ == "__main__":
    world = int(sys.argv[1])
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    load_pdb()  # once for all ranks: importing pdbpp 64 times takes most of a minute on two cores
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, world, size)) for rank in range(first, first + world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    print("codes", sum(process.exitcode for process in ranks))
