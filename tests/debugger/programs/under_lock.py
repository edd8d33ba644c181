"""A rank whose garbage collector runs a stopping destructor while the debugger executes its own code."""

import gc
import sys
import time
import types
from pathlib import Path

from multiprocessing_pdb import MultiprocessingPdb, arm, disarm
from multiprocessing_pdb.rank import timeouts

Tra = MultiprocessingPdb().set_trace


class Dying:
    """An object that stops when collected. It is in a cycle, so the interpreter chooses the moment."""

    def __init__(self):
        self.circle = self

    def __del__(self):
        Tra(header="del")


def collect_in(owner, name):
    """Make garbage and collect it whenever this debugger function runs in the main thread."""
    original = getattr(owner, name)

    def collecting(*arguments, **named):
        if gc.get_threshold()[0] == 0:  # until the end of the test
            Dying()
            gc.collect()
        return original(*arguments, **named)

    setattr(owner, name, collecting)


class Group:
    """A process group with methods in Python, which a step would enter."""

    group_name = "g"
    _device_types = ("cpu",)

    def _get_backend(self, device):
        return types.SimpleNamespace(options=None)


def hold():
    Tra(header="before arm")
    arm(hold=True)
    disarm()


PLACES = {
    "hold": (timeouts, "_find_backends", hold),
}


def main(place, go):
    world = types.SimpleNamespace(pg_map={Group(): None})
    sys.modules["torch.distributed.distributed_c10d"] = types.SimpleNamespace(_world=world)
    owner, name, run = PLACES[place]
    gc.set_threshold(0)
    collect_in(owner, name)
    run()
    gc.set_threshold(700)
    sys.stdout.write("done\n")
    sys.stdout.flush()
    while not go.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
