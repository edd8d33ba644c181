"""A rank whose garbage is collected, with a destructor that stops, in the midst of what the debugger itself does."""

import gc
import sys
import time
import types
from pathlib import Path

from multiprocessing_pdb import MultiprocessingPdb, arm, disarm
from multiprocessing_pdb.rank import timeouts

Tra = MultiprocessingPdb().set_trace


class Dying:
    """Stops when it is collected, which is at a time of the interpreter's choice: it is in a circle."""

    def __init__(self):
        self.circle = self

    def __del__(self):
        Tra(header="del")


def collect_in(owner, name):
    """Make garbage and collect it whenever this function of the debugger runs in the main thread."""
    original = getattr(owner, name)

    def collecting(*arguments, **named):
        if gc.get_threshold()[0] == 0:  # until the end of the test
            Dying()
            gc.collect()
        return original(*arguments, **named)

    setattr(owner, name, collecting)


class Group:
    """A process group whose methods are Python, which a step would go into."""

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
