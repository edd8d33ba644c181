"""Three tasks for a debugger of many ranks: `torchrun --nproc-per-node 4 tasks.py TASK DEBUGGER [STEPS]`.

bias: the router's bias of rank 3 differs from the others'. Find the rank.
hang: rank 1 does not enter the all-to-all of step 2, and the others wait in it. Find that rank and its place.
exchange: step ranks 0 and 1 over the all-to-all.

DEBUGGER names the call that stops the ranks, "none" for debuggers that attach from outside.
"""

import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

EXPERTS = 8


def stop_never():
    """Stop nothing: the debugger attaches from outside."""


def stop_for_client():
    """Wait for an editor, and stop."""
    import debugpy

    debugpy.wait_for_client()
    debugpy.breakpoint()


def choose_stop(name, rank):
    """Return the call that stops this rank according to the debugger's documentation."""
    if name == "ours":
        from multiprocessing_pdb import MultiprocessingPdb

        return MultiprocessingPdb(arm=True).set_trace
    if name == "madbg":
        import madbg

        return partial(madbg.set_trace, port=3513 + rank)
    if name == "debugpy":
        import debugpy

        debugpy.listen(("127.0.0.1", 5700 + rank))
        return stop_for_client
    if name.startswith("torch"):  # torch0 stops rank 0
        return partial(dist.breakpoint, int(name[5:]))
    return stop_never


def wait_for_data():
    """Block forever, like a data loader whose file system is gone."""
    while True:
        time.sleep(0.05)


def exchange(rows, rank, step, task):
    """Send an equal share of the rows to each rank, and return the received rows."""
    if task == "hang" and rank == 1 and step == 2:
        wait_for_data()
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived, rows)
    return arrived


def balance(bias, load, rank, step):
    """Move the bias against the load; rank 3 misses step 1."""
    if rank == 3 and step == 1:
        return bias
    return bias - 0.01 * torch.sign(load - load.mean())


def train(task, stop, rank, num_steps=3):
    """Train; the ranks stop before the exchange of the last step."""
    generator = torch.Generator().manual_seed(rank)
    bias = torch.zeros(EXPERTS)
    for step in range(num_steps):
        rows = torch.randn(8, 4, generator=generator)
        if step == num_steps - 1 and task != "hang":
            stop()
        arrived = exchange(rows, rank, step, task)
        load = arrived.sum() + torch.arange(EXPERTS)
        dist.all_reduce(load)
        bias = balance(bias, load, rank, step)
        time.sleep(0.02)
    return bias


if __name__ == "__main__":
    task, name = sys.argv[1], sys.argv[2]
    rank = int(os.environ["RANK"])
    stop = choose_stop(name, rank)
    dist.init_process_group("gloo")
    sys.stdout.write(f"rank {rank} is ready\n")
    sys.stdout.flush()
    train(task, stop, rank, int(sys.argv[3]) if len(sys.argv) > 3 else 3)
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} done\n")
