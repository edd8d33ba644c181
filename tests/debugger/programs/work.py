"""Stops once in a function of two lines. Its result depends on the rank."""
# ruff: noqa: T201  # a program of the tests: what it prints is compared

import os
import sys
import time

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def work(rank):
    value = rank * 10
    special = "odd" if rank == 1 else "even"
    Tra(header="at work")
    total = value + 1
    total = total * 2
    print("total", total, special)
    return total


def slow():
    """Answer differently per rank: one sleeps, one raises, one dies, the rest answer at once."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        time.sleep(300)
    if rank == 2:
        raise ValueError("broken on purpose")
    if rank == 3:
        os._exit(7)
    return "quick"


print("before")
work(int(os.environ.get("RANK", "0")))
sys.stderr.write("to stderr\n")
if "read" in sys.argv:
    print("read", repr(sys.stdin.read()))
print("after")
