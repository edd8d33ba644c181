"""torch elastic with forked ranks: launches of eight ranks that use the store, until one hangs. torch alone.

Exits with 1 when one hung, after the stack of its rank; with 0 when all ended. Run `reproduce.py [LAUNCHES]`.
"""

import faulthandler
import multiprocessing
import os
import sys

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

NUM_RANKS = 8
LIMIT = 20  # seconds


def connect():
    """Connect to the launcher's store by its name, the first action of `init_process_group`."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    next(rendezvous("env://"))
    faulthandler.cancel_dump_traceback_later()


def launch():
    """Launch the ranks once, as a user's script does."""
    config = LaunchConfig(
        run_id="found",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=NUM_RANKS,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, connect)()


def keep_busy():
    while True:
        pass


if __name__ == "__main__":
    print("torch", torch.__version__)
    launches = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    # The lock is held for microseconds: on a busy machine its holder may be preempted in them.
    for _ in range(2 * (os.cpu_count() or 1)):
        multiprocessing.Process(target=keep_busy, daemon=True).start()
    for number in range(1, launches + 1):
        process = multiprocessing.Process(target=launch)
        process.start()
        process.join()
        if process.exitcode:
            print(f"launch {number}: a rank was not connected after {LIMIT} s")
            sys.exit(1)
    print(f"{launches} launches ended")
