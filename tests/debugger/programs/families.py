"""families.py METHOD: two children, each with its own child, all stopped at once."""
# ruff: noqa: T201  # a program of the tests: what it prints is compared

import multiprocessing
import sys

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def stop(depth, method):
    context = multiprocessing.get_context(method)
    nested = context.Process(target=stop, args=(depth + 1, method)) if depth == 0 else None
    if nested is not None:
        nested.start()
    Tra(header=f"depth {depth}")
    print("depth", depth)
    if nested is not None:
        nested.join()
        assert nested.exitcode == 0


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    children = [context.Process(target=stop, args=(0, sys.argv[1])) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    print("codes", [child.exitcode for child in children])
