"""A program that forks, closes its descriptors and executes itself, or one that has no descriptor left.

The first does not import the debugger: PYTHONBREAKPOINT does.
"""

import contextlib
import importlib
import os
import resource
import sys


def leave():
    breakpoint(header="before")
    child = os.fork()
    if child == 0:
        os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.closerange(3, 100)
    os.execv(sys.executable, [sys.executable, __file__, str(code)])


def starve(rank):
    """Take all descriptors. Rank 1 has no higher limit."""
    # breakpoint() cannot import it without a descriptor
    debugger = importlib.import_module("multiprocessing_pdb")
    halt = debugger.MultiprocessingPdb().set_trace if rank == 1 else breakpoint
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64 if rank == 1 else 128))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    halt(header="no descriptor")
    taken.sort()
    os.write(1, b"went on\n")


if len(sys.argv) == 1:
    leave()
elif sys.argv[1] == "starve":
    starve(int(os.environ["RANK"]))
else:
    breakpoint(header="after exec")
    sys.stdout.write(f"child {sys.argv[1]}\n")
