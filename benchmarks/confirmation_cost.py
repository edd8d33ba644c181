"""Measures the CPU time of clean cases of users' models with their confirmations, against their own run.

    python benchmarks/confirmation_cost.py
    python benchmarks/confirmation_cost.py my_case.yaml --repeats 5
    python benchmarks/confirmation_cost.py --precision float32    # decided at once: the ratio is 1

A case runs with `--no-escalate` and without it, in turn, and makes its goldens each time. A ratio compares two
commands that ran one after the other, processes included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
CASES = (
    ROOT / "examples/my_moe/ep.yaml",
    ROOT / "examples/my_gpt/fsdp2.yaml",
    ROOT / "examples/my_gpt/fsdp-tp.yaml",
)


def run(case: Path, precision: str, folder: Path, options: Sequence[str]) -> tuple[float, str]:
    """Return the CPU seconds of a run and all its processes, and the precision that decided its pass."""
    paths = [ROOT, ROOT / "examples", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "moeverify", "run", str(case), "--set", f"recipe.precision={precision}"]
    command += ["--json", str(folder / "result.json"), "--goldens", str(folder)]
    command += ["--cache", str(folder / "cache"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 4):
        raise SystemExit(done.stdout + done.stderr)
    result = json.loads((folder / "result.json").read_text())["cases"][0]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, result["decided_in"] or result["verdict"]


def measure(case: Path, precision: str, repeats: int) -> list[object]:
    """Return a row: the case, medians of both commands, the median ratio, and the precision that decided."""
    own, whole, decided = [], [], ""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            own.append(run(case, precision, Path(folder), ["--no-escalate"])[0])
            seconds, decided = run(case, precision, Path(folder), [])
            whole.append(seconds)
    ratio = statistics.median(right / left for left, right in zip(own, whole, strict=True))
    return [case.stem, statistics.median(own), statistics.median(whole), ratio, decided]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", type=Path, default=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="bfloat16")
    options = parser.parse_args()
    rows = [measure(case, options.precision, options.repeats) for case in options.cases]
    headers = ["case", "own, CPU s", "confirmed, CPU s", "ratio", "decided in"]
    print(tabulate(rows, headers, floatfmt=".2f"))


if __name__ == "__main__":
    main()
