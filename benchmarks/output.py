"""Output shared by all benchmarks: the command and its setting, and the numbers as a table."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]


def print_setting():
    """Print the command, the date, the versions, and the load of the machine."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    print(f"$ python {shlex.join([str(script), *sys.argv[1:]])}")
    versions = [f"python {platform.python_version()}"]
    for name in ("moeverify", "torch", "triton"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{datetime.datetime.now(datetime.UTC).date()}, {', '.join(versions)}, {load}", flush=True)


def print_table(headers, rows, title=""):
    """Print rows under their headers, the first column left-aligned and all numbers right-aligned."""
    align = ["left", *["right"] * (len(headers) - 1)]
    table = tabulate(
        rows, headers, tablefmt="simple", colalign=align if rows else None, disable_numparse=True
    )
    print(f"\n{title}\n{table}" if title else f"\n{table}", flush=True)
