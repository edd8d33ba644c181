"""Compiled functions that call another one, in which they stop: twice by Tra(), twice by breakpoint()."""

import sys
import types

import torch

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def inner(value, stop):
    dead = value * 3  # noqa: F841
    stop()
    return value + 1


def outer(value, inner, stop):
    unused = value + 1  # noqa: F841
    second = inner(value, stop)
    return second * 2


def copy(function):
    """Return the function with another code object: torch.compile keeps what it knows of one."""
    return types.FunctionType(function.__code__.replace(), globals())


for stop in (Tra, breakpoint):
    run, called = torch.compile(copy(outer), backend="eager", fullgraph=stop is Tra), copy(inner)
    for _ in range(2):
        sys.stdout.write(f"{run(torch.ones(2), called, stop).tolist()}\n")
