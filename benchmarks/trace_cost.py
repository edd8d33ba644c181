"""Cost of the trace per collective: without a trace, with records alone, and with the comparison ledger.

python benchmarks/trace_cost.py [--calls 200] [--rounds 15]

Two ranks reduce four numbers over gloo. The three ways take turns, round by round. The output is the median
and the minimum of the rounds on rank 0, in microseconds of CPU time per collective: a busy machine
stretches wall time.
"""

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing
from output import print_setting, print_table

from moeverify.verification.collectives.trace import CollectiveTrace


class RecordsAlone(CollectiveTrace):
    """The trace without its ledger."""

    def _note(self, collective):
        pass


def measure(trace, calls):
    """Return microseconds of one all-reduce in a context."""
    tensor = torch.zeros(4)
    with trace:
        dist.barrier()
        begun = time.thread_time()
        for _ in range(calls):
            dist.all_reduce(tensor)
        return (time.thread_time() - begun) / calls * 1e6


def run(rank, options, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    ways = {"no trace": nullcontext, "records alone": RecordsAlone, "records and ledger": CollectiveTrace}
    taken = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, make in ways.items():
            taken[name].append(measure(make(), options.calls))
    if rank == 0:
        rows = [
            (name, f"{statistics.median(rounds):.1f}", f"{min(rounds):.1f}") for name, rounds in taken.items()
        ]
        print_table(("way", "median us", "least us"), rows)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print_setting()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (options, f"{folder}/store"), nprocs=2)


if __name__ == "__main__":
    main()
