"""A thread that ends while a breakpoint is set: a Tra() in what is destroyed last of all, and values let go of."""

import gc
import sys
import threading
import time
import weakref
from pathlib import Path

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace
LOCAL = threading.local()


class Value:
    """Something whose lifetime is watched."""


class Late:
    """Destroyed with the values that belong to the thread, after the debugger's own."""

    def __del__(self):
        Tra(header="late")


def never_called():
    return None


def let_go(seen):
    value = Value()
    seen.append(weakref.ref(value))
    Tra(header="first")
    del value


def work(seen):
    let_go(seen)
    LOCAL.late = Late()


def main(go):
    gc.disable()
    seen = []
    thread = threading.Thread(target=work, args=(seen,))
    thread.start()
    thread.join()
    let_go(seen)
    sys.stdout.write(f"alive {[value() is not None for value in seen]}\n")
    sys.stdout.flush()
    while not go.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
