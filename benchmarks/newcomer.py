"""Measures the way of a newcomer, in environments of their own: commands and seconds to the first verdicts.

    python benchmarks/newcomer.py --out DIR
    python benchmarks/newcomer.py --out DIR --checkouts FOLDER    # with nanoGPT, from FOLDER/nanoGPT
    python benchmarks/newcomer.py --out DIR --only clone my_moe --python python3.12

`clone` is a clone of this repository and `make verify` of one case. Every other row begins with the wheel in an
environment that all of them share, and ends with what `moeverify init` verified. Packages come from the index of pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]


class Model(NamedTuple):
    """A model: what `init` is given, further packages, and a folder below ROOT or --checkouts that is copied."""

    name: str
    target: str
    packages: tuple[str, ...] = ()
    source: str = ""


MODELS = (
    Model("my_gpt", "my_gpt.model:make", source="examples/my_gpt"),
    Model("my_moe", "my_moe.model:make", source="examples/my_moe"),
    Model("nanoGPT", "model:GPT", source="nanoGPT"),
    Model("Qwen3-MoE", "transformers:Qwen3MoeForCausalLM", ("transformers", "accelerate")),
    Model("torchtitan", "torchtitan.models.llama3.model:Llama3Model", ("torchtitan", "spmd-types")),
)


class Clock:
    """Runs commands and adds up their number and seconds; the output goes to a log."""

    def __init__(self, log: Path) -> None:
        self.log, self.num_commands, self.seconds = log, 0, 0.0

    def run(self, *command: str | Path, folder: Path) -> str:
        variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CI")}
        started = time.monotonic()
        done = subprocess.run(
            list(map(str, command)),
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.seconds += time.monotonic() - started
        self.num_commands += 1
        with self.log.open("a") as file:
            file.write(f"$ {' '.join(map(str, command))}\n{done.stdout}exit code {done.returncode}\n\n")
        return done.stdout


def install(python: str, out: Path) -> tuple[Path, Clock]:
    """Return the programs of a fresh environment that has the wheel, and the clock of its two commands."""
    build = Clock(out / "build.log")
    build.run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out / "wheel", ROOT, folder=out)
    clock = Clock(out / "install.log")
    clock.run(python, "-m", "venv", "env", folder=out)
    (wheel,) = (out / "wheel").glob("*.whl")
    clock.run(out / "env" / "bin" / "pip", "install", "-q", wheel, folder=out)
    return out / "env" / "bin", clock


def start(model: Model, programs: Path, checkouts: Path | None, out: Path, installed: Clock) -> list[object]:
    """Return the row of a model: commands and seconds from the wheel on, and the layouts that passed."""
    folder = out / model.name
    folder.mkdir()
    if model.source:
        source = ROOT / model.source
        if not source.is_dir():
            source = (checkouts or Path()) / model.source
        if not source.is_dir():
            return [model.name, "no checkout"]
        is_package = model.target.startswith(f"{source.name}.")
        shutil.copytree(source, folder / source.name if is_package else folder, dirs_exist_ok=True)
    clock = Clock(out / f"{model.name}.log")
    if model.packages:
        clock.run(programs / "pip", "install", "-q", *model.packages, folder=folder)
    packages = clock.seconds
    said = clock.run(programs / "moeverify", "init", model.target, folder=folder)
    return [
        model.name,
        installed.num_commands + clock.num_commands,
        f"{installed.seconds + packages:.0f}",
        f"{clock.seconds - packages:.0f}",
        *count_verified(said),
    ]


def clone(out: Path) -> list[object]:
    """Return the row of a clone: `make verify` of one case, which installs into an environment of its own."""
    clock = Clock(out / "clone.log")
    clock.run("git", "clone", "-q", ROOT, "clone", folder=out)
    said = clock.run("make", "verify", "CASES=cases/ep2.yaml", "MEGABLOCKS=no", folder=out / "clone")
    return ["clone", clock.num_commands, f"{clock.seconds:.0f}", "", *count_verified(said)]


def count_verified(said: str) -> tuple[str, str]:
    """Return how many cases passed, and an error or the closing line."""
    closing = [line for line in said.splitlines() if re.match(r"(pass|mismatch|undecided|error)[: ] ?", line)]
    passed = re.search(r"(\d+) pass\b", closing[-1]) if closing else None
    return passed[1] if passed else "0", closing[-1] if closing else "no verdict"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--checkouts", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default=sys.executable, help="makes the environment of the wheel")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True)
    wanted = options.only or ["clone", *(each.name for each in MODELS)]
    rows = [clone(out)] if "clone" in wanted else []
    models = [each for each in MODELS if each.name in wanted]
    if models:
        programs, installed = install(options.python, out)
        rows += [start(each, programs, options.checkouts, out, installed) for each in models]
    headers = ["start", "commands", "install, s", "init, s", "layouts that passed", "last line"]
    print(tabulate(rows, headers, disable_numparse=True))
    return sum(len(row) < len(headers) or row[4] in ("0", "1") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
