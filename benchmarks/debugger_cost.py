"""Costs of the debugger: a Tra() that does not stop, its import, and queries of 64 stopped ranks.

python benchmarks/debugger_cost.py [--ranks 64] [--nodes 1] [--repeats 5] [--size 4] [--device cpu]

Prints numbers and ratios: against a plain function call, and against querying the ranks one after another,
as with a single-process debugger. With --nodes the ranks are divided over separate runtime directories,
each behind a relay, like separate nodes. For a tensor of 1 GB it prints the time of one core, or of the
device.
"""

import argparse
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

from output import print_setting, print_table

ROOT = Path(__file__).resolve().parents[1]
RANKS = ROOT / "tests" / "debugger" / "programs" / "crowd.py"
sys.path.insert(0, str(ROOT))


def plain(*, when=True):
    """Do nothing: the baseline cost of a call of this form."""
    return when


def measure_call(function, number=500_000, repeats=5):
    """Return nanoseconds of `function(when=False)`, the best of several runs."""
    timer = timeit.Timer("call(when=False)", globals={"call": function})
    return min(timer.repeat(repeats, number)) / number * 1e9


def measure_import(module):
    """Return milliseconds that a process spends on importing `module`, the best of five."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT) for _ in range(5)]
    return min(float(run.stdout) for run in runs) * 1e3


def open_registry(directories):
    """Return a new console's registry: of this node's ranks, or of ranks behind relays."""
    from multiprocessing_pdb.console.registry import RankRegistry
    from multiprocessing_pdb.console.remote import RemoteSource
    from multiprocessing_pdb.console.source import LocalSource

    if len(directories) == 1:
        return RankRegistry([LocalSource(print)], None)
    lines = [f"env MPDB_DIR={shlex.quote(directory)} sh -c" for directory in directories]
    return RankRegistry([RemoteSource(line, sys.executable, print) for line in lines], None)


def measure_ask(world, size, repeats, directories):
    """Return seconds until all have stopped, of a first diff, of later ones, and of querying one by one."""
    from multiprocessing_pdb.console.broadcast import ask
    from multiprocessing_pdb.console.comparison import compare

    begun = time.perf_counter()
    share = world // len(directories)
    jobs = [
        subprocess.Popen(
            [sys.executable, RANKS, str(share), str(size), str(share * node)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "MPDB_DIR": directory,
                "MPDB_JOB": "crowd",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node, directory in enumerate(directories)
    ]
    registry = open_registry(directories)
    registry.await_count(world, 300)
    stopping = time.perf_counter() - begun
    registry.close()
    begun = time.perf_counter()
    registry = open_registry(directories)
    _, text = compare(registry.find(), "loss", 60)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    targets = registry.find()
    finding = time.perf_counter() - begun
    together, in_turn = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        compare(targets, "loss", 60)
        together.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for target in targets:
            ask([target], {"do": "line", "text": "p loss"}, 60)
        in_turn.append(time.perf_counter() - begun)
    arrays = []
    for _ in range(repeats if size else 0):
        begun = time.perf_counter()
        compare(targets, "big", 60)
        arrays.append(time.perf_counter() - begun)
    ask(targets, {"do": "line", "text": "continue", "command": True}, 60)
    registry.close()
    for job in jobs:
        job.wait(60)
    big = statistics.median(arrays) if arrays else math.nan
    return stopping, first, finding, statistics.median(together), statistics.median(in_turn), big, text


def measure_gigabyte(device):
    """Yield labels, and seconds of the norm and hash of 1 GB: CPU time of a core, or time on a device."""
    import torch

    from multiprocessing_pdb.rank.tensors import summarise

    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    side = 1 << 14
    for name, make in {
        "float32": lambda: torch.randn(side, side, device=device),
        "bfloat16": lambda: torch.randn(2 * side, side, device=device, dtype=torch.bfloat16),
        "float32, transposed": lambda: torch.randn(side, side, device=device).t(),
    }.items():
        value = make()
        summarise(value[:64], lambda: None)
        times = []
        for _ in range(3):
            begun = clock()
            summarise(value, lambda: None)
            times.append(clock() - begun)
        yield f"norm and hash of 1 GB of {name}", f"{min(times):.2f} s"
        del value


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=1, help="each behind a relay of its own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", type=int, default=4, help="MB of an array on each rank")
    parser.add_argument("--device", default="cpu", help="of the tensors of 1 GB")
    options = parser.parse_args()
    print_setting()
    from multiprocessing_pdb import MultiprocessingPdb

    base, ours = measure_call(plain), measure_call(MultiprocessingPdb().set_trace)
    rows = [("Tra(when=False)", f"{ours:.0f} ns"), ("a plain function", f"{base:.0f} ns")]
    rows += [
        (f"import {name}", f"{measure_import(name):.1f} ms")
        for name in ("multiprocessing_pdb", "pdb", "pdbpp")
    ]
    with tempfile.TemporaryDirectory(prefix="mpdb-cost-", dir="/tmp") as directory:
        directories = [directory]
        os.environ["MPDB_DIR"] = directory
        if options.nodes > 1:  # the console has an empty directory: relays would take over a node's
            directories = [str(Path(directory, f"node{number}")) for number in range(options.nodes)]
            del os.environ["MPDB_DIR"]
        os.environ["PYTHONPATH"] = str(ROOT)
        stopping, first, finding, together, in_turn, big, text = measure_ask(
            options.ranks, options.size, options.repeats, directories
        )
    rows += [
        ("all ranks started and stopped", f"{stopping:.2f} s"),
        ("diff of a console just opened, connecting included", f"{first * 1e3:.0f} ms"),
        ("finding out which ranks are stopped, before each command", f"{finding * 1e3:.0f} ms"),
        ("diff, all ranks at once", f"{together * 1e3:.0f} ms"),
        ("p, one rank after the other", f"{in_turn * 1e3:.0f} ms"),
        (f"diff of {options.size} MB on each rank", f"{big * 1e3:.0f} ms"),
        *measure_gigabyte(options.device),
    ]
    print_table(("what", "takes"), rows, f"{options.ranks} ranks:")
    print(
        f"\nTra is {ours / base:.2f} x a plain function; one by one takes {in_turn / together:.2f} x all at once"
    )
    print(text)


if __name__ == "__main__":
    main()
