"""A thread ends while a breakpoint is set; only a garbage collection in the server drops its locals."""

import gc
import sys
import threading
import time
from pathlib import Path

from multiprocessing_pdb import MultiprocessingPdb
from multiprocessing_pdb.rank import stop
from multiprocessing_pdb.wire.runtime_directory import RuntimeDirectory

Tra = MultiprocessingPdb().set_trace


def never_called():
    return None


def work():
    circle = [vars(stop._THREAD)]
    circle.append(circle)
    Tra(header="in the thread")


def collect_where_the_lock_is_held(directory, name, has=RuntimeDirectory.has):
    if gc.collect():
        sys.stdout.write("collected\n")
        sys.stdout.flush()
    return has(directory, name)


def main(go):
    gc.disable()
    RuntimeDirectory.has = collect_where_the_lock_is_held
    threading.Thread(target=work).start()
    while not go.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
