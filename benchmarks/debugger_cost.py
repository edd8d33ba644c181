"""What the debugger costs: a Tra() that does not stop, importing it, and asking 64 stopped ranks.

    python benchmarks/debugger_cost.py [--ranks 64] [--repeats 5]

Prints numbers and ratios: against a plain function call, and against asking the ranks one after the other, as
a debugger for one process has to.
"""

import argparse
import os
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
    """What a call of this form costs in any case."""
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


def measure_ask(world, repeats):
    """Return seconds: until all have stopped, of a first diff, of later ones, and of asking one by one."""
    from multiprocessing_pdb.console.broadcast import ask
    from multiprocessing_pdb.console.comparison import compare
    from multiprocessing_pdb.console.registry import RankRegistry
    from multiprocessing_pdb.console.source import LocalSource

    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    job = subprocess.Popen(
        [sys.executable, RANKS, str(world)],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    registry = RankRegistry([LocalSource(print)], None)
    registry.await_count(world, 300)
    stopping = time.perf_counter() - begun
    registry.close()
    registry = RankRegistry([LocalSource(print)], None)  # as a console that is opened now
    begun = time.perf_counter()
    _, text = compare(registry.find(), "loss", 60)
    first = time.perf_counter() - begun
    targets = registry.find()
    together, in_turn = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        compare(targets, "loss", 60)
        together.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for target in targets:
            ask([target], {"do": "line", "text": "p loss"}, 60)
        in_turn.append(time.perf_counter() - begun)
    ask(targets, {"do": "line", "text": "continue", "command": True}, 60)
    registry.close()
    job.wait(60)
    return stopping, first, statistics.median(together), statistics.median(in_turn), text


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
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
        os.environ["MPDB_DIR"] = directory
        stopping, first, together, in_turn, text = measure_ask(options.ranks, options.repeats)
    rows += [
        ("all ranks started and stopped", f"{stopping:.2f} s"),
        ("diff of a console just opened, connecting included", f"{first * 1e3:.0f} ms"),
        ("diff, all ranks at once", f"{together * 1e3:.0f} ms"),
        ("p, one rank after the other", f"{in_turn * 1e3:.0f} ms"),
    ]
    print_table(("what", "takes"), rows, f"{options.ranks} ranks:")
    print(
        f"\nTra is {ours / base:.2f} x a plain function; one by one takes {in_turn / together:.2f} x all at once"
    )
    print(text)


if __name__ == "__main__":
    main()
