"""A thread prints while the main thread is stopped."""
# ruff: noqa: T201  # what it prints is compared

import threading
import time

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def tick():
    number = 0
    while not over.is_set():
        print(f"tick {number}", flush=True)
        number += 1
        time.sleep(0.01)


over = threading.Event()
thread = threading.Thread(target=tick)
thread.start()
Tra()
over.set()
thread.join()
