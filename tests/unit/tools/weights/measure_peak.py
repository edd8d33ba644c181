"""Run by a test: convert with chunks of a given size, and print the peak growth of memory in bytes."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path

from moeverify.tools.weights import safetensors_files, source
from moeverify.tools.weights.stream import convert


def read_memory(key: str) -> int:
    """Return a number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    start, to, piece_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    source.CHUNK_BYTES = safetensors_files._MAPPED_BYTES = piece_bytes
    # Some modules of torch import it at their first use, if it is installed.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")
    before = read_memory("VmRSS")
    convert(start, start.with_name(f"to-{to}"), to)  # type: ignore[arg-type]
    sys.stdout.write(f"{read_memory('VmHWM') - before}\n")


if __name__ == "__main__":
    main()
