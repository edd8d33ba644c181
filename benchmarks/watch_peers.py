"""Bugs of two training scripts, under `moeverify watch`, its guard, printed numbers and other tools.

python benchmarks/watch_peers.py --page watch-peers.md --msprobe PYTHON

PYTHON is an interpreter with mindstudio-probe; without one its column is left out. The scripts use none of
the tools (`tests/ranks/watch/programs`). Every tool runs the script itself. The tools compare different
data:

- `compare`: two recorded steps against those of one device; `guard`: the run alone, 6 steps;
- `loss`, `loss + norm`: 6 printed steps against those of one device, within 1e-3;
- `msprobe`: the norms of the optimizer's gradients that its monitor writes, 6 steps, against those of one
  device, within 1e-3. It compares nothing by itself: this rule is ours.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from moeverify.report.words.run import word_finding
from moeverify.results.finding import Finding
from moeverify.scripts.compare.compare import compare_runs
from moeverify.scripts.guard.judge import Judge
from moeverify.scripts.record.read import RecordedRun

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "ranks" / "watch" / "programs"
CLOSE = 1e-3
NONE = "none"


@dataclass(frozen=True)
class Script:
    """A training script with its ranks and its bugs. `steps` applies to every tool except the recorder."""

    title: str
    file: str
    num_ranks: int
    bugs: tuple[str, ...]
    steps: int = 6


SCRIPTS = (
    Script(
        "DDP and expert parallelism, two ranks",
        "train_ep.py",
        2,
        ("zero-grad", "norm-twice", "router", "experts", "data", "scheduler", "alike", "combine"),
    ),
    Script(
        "FSDP2 and tensor parallelism, four ranks (2 x 2)",
        "train_fsdp_tp.py",
        4,
        ("zero-grad", "no-zero", "norm-twice", "local-norm", "divisor", "data", "scheduler", "forgotten"),
    ),
)


@dataclass(frozen=True)
class Seen:
    """A tool's result for one run: whether something is wrong, and its first words."""

    is_flagged: bool
    words: str = ""


class Bench:
    """A runner of one script under all tools; `folder` keeps their files."""

    def __init__(self, script: Script, folder: Path, msprobe: str | None) -> None:
        self.script = script
        self.folder = folder / script.file.removesuffix(".py")
        self.msprobe = msprobe

    def run(self) -> None:
        """Run every tool on one device and on the ranks, with every bug."""
        tools = ["plain", "watch", "guard", *(["msprobe"] if self.msprobe else [])]
        for tool in tools:
            python = self.msprobe if tool == "msprobe" and self.msprobe else sys.executable
            for world, bugs in ((1, (NONE,)), (self.script.num_ranks, (NONE, *self.script.bugs))):
                if (tool, world) == ("guard", 1):
                    continue
                words = [str(ROOT / "benchmarks" / "watch_ranks.py"), tool, str(PROGRAMS / self.script.file)]
                words += [
                    str(self.out(tool, world)),
                    str(world),
                    str(2 if tool == "watch" else self.script.steps),
                ]
                path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
                environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
                done = subprocess.run([python, *words, *bugs], check=False, env=environment)
                if done.returncode:
                    sys.stderr.write(f"{tool} on {world} ranks: {done.returncode} ranks failed\n")

    def out(self, tool: str, world: int) -> Path:
        """Return the folder of a tool's runs on this many ranks."""
        return self.folder / f"{tool}{world}"

    def see(self, tool: str, bug: str) -> Seen:
        """Return a tool's result for a bug."""
        sees: Mapping[str, Callable[[str], Seen]] = {
            "compare": self._compare,
            "guard": self._guard,
            "loss": lambda bug: self._numbers(bug, ("loss",)),
            "loss + norm": lambda bug: self._numbers(bug, ("loss", "norm")),
            "msprobe": self._norms,
        }
        return sees[tool](bug)

    def _compare(self, bug: str) -> Seen:
        one = RecordedRun.read(self.out("watch", 1) / NONE / "run")
        result = compare_runs(one, RecordedRun.read(self.out("watch", self.script.num_ranks) / bug / "run"))
        return _first([word_finding(each) for each in result.findings if not each.follows])

    def _guard(self, bug: str) -> Seen:
        judge = Judge(self.out("guard", self.script.num_ranks) / bug / "guard")
        return _first([word_finding(each) for each in judge.look(is_over=True)])

    def _numbers(self, bug: str, names: Sequence[str]) -> Seen:
        expected = read_numbers(self.out("plain", 1) / NONE / "rank0.log")
        actual = read_numbers(self.out("plain", self.script.num_ranks) / bug / "rank0.log")
        for step, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
            for name in names:
                if not math.isclose(wanted[name], found[name], rel_tol=CLOSE):
                    return Seen(True, f"{name} of step {step}")
        return Seen(False)

    def _norms(self, bug: str) -> Seen:
        expected = read_norms(self.out("msprobe", 1) / NONE / "monitor", 1)
        actual = read_norms(
            self.out("msprobe", self.script.num_ranks) / bug / "monitor", self.script.num_ranks
        )
        if not expected or expected.keys() - actual.keys():
            return Seen(True, f"{len(expected.keys() - actual.keys())} norms are not there")
        wrong = [key for key in sorted(expected) if not _is_one_of(expected[key][0], actual[key])]
        names = list(dict.fromkeys(name for step, name in wrong if step == wrong[0][0]))
        if not names:
            return Seen(False)
        return Seen(
            True, f"step {wrong[0][0]}: {len(names)} of {len({n for _, n in expected})} norms, {names[0]}"
        )

    def seconds(self, tool: str) -> float:
        """Return the median time of a step of the right script on the ranks, without the first two."""
        steps: list[float] = []
        for file in sorted((self.out(tool, self.script.num_ranks) / NONE).glob("rank*.seconds")):
            steps += json.loads(file.read_text())[1 if tool == "watch" else 2 :]
        return statistics.median(steps) if steps else math.nan


def _is_one_of(expected: float, by_rank: Sequence[float]) -> bool:
    """Return whether the ranks' norms are those of a whole tensor: each of them, or their sum of squares."""
    whole = all(math.isclose(expected, each, rel_tol=CLOSE) for each in by_rank)
    copies = range(1, len(by_rank) + 1)
    total = math.hypot(*by_rank)
    return whole or any(
        math.isclose(expected, total / math.sqrt(number), rel_tol=CLOSE) for number in copies[:-1]
    )


def read_numbers(file: Path) -> list[dict[str, float]]:
    """Return loss and norm of each step that a script has printed."""
    found = re.findall(r"step \d+ loss (\S+) norm (\S+)", file.read_text())
    return [{"loss": float(loss), "norm": float(norm)} for loss, norm in found]


def read_norms(folder: Path, num_ranks: int) -> dict[tuple[int, str], list[float]]:
    """Return the norm of each gradient on every rank, by step and name, as written by msprobe's monitor."""
    norms: dict[tuple[int, str], list[float]] = {}
    for rank in range(num_ranks):
        for file in sorted((folder / f"rank_{rank}").glob("*.csv")):
            for row in csv.DictReader(file.open()):
                if row["scope"] == "reduced":  # the optimizer's input
                    name = re.sub(r"^(module\.)+", "", row["module_name"])
                    norms.setdefault((int(row["step"]), name), []).append(float(row["norm"]))
    return norms


def _first(findings: Sequence[Finding]) -> Seen:
    if not findings:
        return Seen(False)
    first = findings[0]
    cause = first.cause or f"{first.check}: {first.tensor} differs"
    return Seen(True, f"{cause} ({first.where})" if first.where else cause)


def list_page(benches: Sequence[Bench], tools: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Results: the bugs of two scripts under several tools"
    yield ""
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    load = f"{os.cpu_count()} cores with a load of {os.getloadavg()[0]:.0f}"
    yield f"{now}, torch {torch.__version__}, {platform.machine()}, {load}, gloo, float32. Made by"
    yield ""
    yield "    python benchmarks/watch_peers.py --msprobe PYTHON --page watch-peers.md"
    yield ""
    yield "whose docstring says what each tool compares with. The bugs were planted by us, one seed each. In the last"
    yield "row are times a step: medians of the right script, for `compare` those of a recorded step."
    for bench in benches:
        yield ""
        yield f"## {bench.script.title}"
        yield ""
        yield "| Bug | " + " | ".join(tools) + " | `compare` reports first |"
        yield "|---" * (len(tools) + 2) + "|"
        counts = dict.fromkeys(tools, 0)
        for bug in (NONE, *bench.script.bugs):
            seen = {tool: bench.see(tool, bug) for tool in tools}
            marks = [("yes" if seen[tool].is_flagged else "no") for tool in tools]
            counts = {tool: counts[tool] + (bug != NONE and seen[tool].is_flagged) for tool in tools}
            label = "none" if bug == NONE else f"`{bug}`"
            yield f"| {label} | " + " | ".join(marks) + f" | {seen['compare'].words} |"
            for tool in tools[1:]:
                if seen[tool].words:
                    sys.stderr.write(f"{bench.script.file} {bug} {tool}: {seen[tool].words}\n")
        total = " | ".join(f"{counts[tool]} of {len(bench.script.bugs)}" for tool in tools)
        yield f"| flagged | {total} | |"
        base = bench.seconds("plain")
        times = {"compare": "watch", "guard": "guard", "msprobe": "msprobe"}
        cells = [f"{bench.seconds(times[tool]) / base:.1f}" if tool in times else "1" for tool in tools]
        yield f"| times a plain step, {1000 * base:.0f} ms | " + " | ".join(cells) + " | |"


def main() -> None:
    """Run everything and print the page, or write it."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--page", type=Path)
    arguments.add_argument("--msprobe", help="an interpreter with mindstudio-probe")
    arguments.add_argument("--keep", type=Path, help="a folder for what the tools write")
    arguments.add_argument("--reuse", action="store_true", help="read what --keep has of an earlier run")
    arguments.add_argument("--only", help="a part of a script's name")
    options = arguments.parse_args()
    tools = ["compare", "guard", "loss", "loss + norm", *(["msprobe"] if options.msprobe else [])]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        benches = [
            Bench(script, folder, options.msprobe)
            for script in SCRIPTS
            if not options.only or options.only in script.file
        ]
        for bench in benches if not options.reuse else ():
            bench.run()
        page = "\n".join(list_page(benches, tools)) + "\n"
    if options.page:
        options.page.write_text(page)
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
