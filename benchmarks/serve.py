"""A small case with and without `moeverify serve`: alternating pairs in one run, and their ratio.

python benchmarks/serve.py [--case cases/ddp.yaml] [--pairs 4]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

COMMAND = (sys.executable, "-m", "moeverify")


def measure(case: str, *, warm: bool) -> float:
    """Return the wall seconds of one run. A variable that libraries may read keeps a run from the server."""
    environment = dict(os.environ) if warm else {**os.environ, "MOEVERIFY_BENCHMARK": "cold"}
    began = time.perf_counter()
    command = [*COMMAND, "run", case, "--no-escalate"]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    """Print each pair, and the median ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="cases/ddp.yaml")
    parser.add_argument("--pairs", type=int, default=4)
    given = parser.parse_args()
    subprocess.run([*COMMAND, "serve"], stdout=subprocess.DEVNULL, check=True)
    try:
        measure(given.case, warm=True)  # makes the goldens' cache the same for all
        pairs = [
            (measure(given.case, warm=False), measure(given.case, warm=True)) for _ in range(given.pairs)
        ]
    finally:
        subprocess.run([*COMMAND, "serve", "--stop"], stdout=subprocess.DEVNULL, check=False)
    for cold, warm in pairs:
        print(f"cold {cold:.1f} s, warm {warm:.1f} s")
    print(f"median ratio {statistics.median(cold / warm for cold, warm in pairs):.2f}")


if __name__ == "__main__":
    main()
