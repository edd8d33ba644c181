"""A thread ends while a breakpoint is set, with a Tra() in the object destroyed last, and released values."""

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
    """An object whose lifetime is observed."""


class Late:
    """An object destroyed with the thread's values, after the debugger's own."""

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
