"""Cost of `moeverify watch`, `--outputs` and `--guard` by model size, in time and memory: two tables.

python benchmarks/watch_sizes.py 128 256 512
python benchmarks/watch_sizes.py 512 1024 2048 --layers 8 --rows 32 --tokens 16384 --ranks 2

The numbers are widths. On a GPU it takes under three minutes; with --ranks the guard is measured under
FSDP2 too. Steps 5 to 9 are recorded; a step with recording is compared with the others of the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from output import print_setting

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
MODES = {"no tool": None, "watch": (), "watch --outputs": ("--outputs",), "watch --guard": ("--guard",)}


def main() -> None:
    """Measure every size and print the tables."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("widths", type=int, nargs="+")
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--rows", type=int, default=4, help="of 512 tokens, in a step of the first table")
    arguments.add_argument("--tokens", type=int, default=2048, help="in a step of the second table")
    arguments.add_argument("--ranks", type=int, default=1)
    options = arguments.parse_args()
    print_setting()
    print("| million parameters | tool | step, ms | recorded step | peak memory, GiB | on disk, MiB a step |")
    print("|---|---|---|---|---|---|")
    for width in options.widths:
        for mode, flags in MODES.items():
            print(measure(width, mode, flags, options), flush=True)
    sizes = ["--layers", str(options.layers), "--tokens", str(options.tokens), "--rounds", "1"]
    for width in options.widths:
        for ranks in sorted({1, options.ranks}):
            run([*launch(ranks), str(FOLDER / "guard_overhead.py"), "--width", str(width), *sizes], show=True)


def measure(width: int, mode: str, flags: tuple[str, ...] | None, options: argparse.Namespace) -> str:
    """Return the row of one size under one tool."""
    with tempfile.TemporaryDirectory() as temporary:
        out, numbers = Path(temporary) / "run", Path(temporary) / "numbers.json"
        script = [str(FOLDER / "watch_overhead.py"), "--width", str(width), "--layers", str(options.layers)]
        command = [sys.executable, *script, "--rows", str(options.rows), "--json", str(numbers)]
        if flags is not None:
            steps = [] if "--guard" in flags else ["--steps", "5-9"]
            watch = [sys.executable, "-m", "moeverify", "watch", *flags, *steps, "--out", str(out), "--"]
            command = [*watch, *command]
        run(command)
        found = json.loads(numbers.read_text())
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    base = found["after"]
    records = flags is not None and "--guard" not in flags
    cells = [f"{found['parameters'] / 1e6:.1f}", mode, f"{1000 * base:.1f}"]
    cells += [f"{found['in'] / base:.2f} times" if records else "-", f"{found['peak'] / 2**30:.3f}"]
    cells += [f"{size / 5 / 2**20:.0f}" if records else "-"]
    return "| " + " | ".join(cells) + " |"


def launch(ranks: int) -> list[str]:
    """Return the command that starts a script on this many ranks."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]


def run(command: list[str], *, show: bool = False) -> None:
    """Run a command to its end.

    Raises: SystemExit with the command's output when it fails.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-2000:]}")
    if show:
        print(done.stdout, flush=True)


if __name__ == "__main__":
    main()
