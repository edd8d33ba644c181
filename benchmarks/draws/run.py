"""Runs planted bugs, and the clean cases they stand in, and keeps what is said of each.

    python benchmarks/draws/run.py --out runs/draws --workers 1
    python benchmarks/draws/run.py --out runs/draws --only 'p3*' --precision bfloat16
    python benchmarks/draws/run.py --out runs/draws --clean
    python benchmarks/draws/run.py --out runs/draws --clean --every --precision mixed --seeds 10

Every plant is verified by the command line: `moeverify run`, `reshard`, or `watch` and `compare`. Cases of one
stack share a command, whose ranks serve them all; `--workers` commands run beside each other. In `--out` each plant
gets `results/ID--PRECISION.json` (verdict, leading findings, the command), `text/ID--PRECISION.txt` (what was
printed) and `json/ID--PRECISION.json.gz` (all of the JSON). What is there is not run again without `--again`. A
command that ends early, or over its limit, loses no case that it has finished; the others of it then run one by one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fold import fold
from loader import BUILTIN, HERE, PLANTS, ROOT, STACKS, Plant, choose, load_plants
from ruamel.yaml import YAML
from tabulate import tabulate
from variants import PRECISIONS, adapt, read_case, read_seeds, vary_seed

MARGIN = 90.0
"""Seconds that a command may take beside its cases: starting Python and ranks, and making goldens."""

_LEFT_OUT = ("timeline", "errors", "load", "mesh")
"""Keys of a case that are not scored. The gzipped JSON has them."""


@dataclass(frozen=True)
class Job:
    """Plants that one command verifies, in one precision."""

    name: str
    plants: tuple[Plant, ...]
    precision: str

    @property
    def weight(self) -> int:
        """Return the approximate amount of work, which determines the start order."""
        return sum(plant.num_ranks for plant in self.plants)


@dataclass
class Runner:
    """Runner of jobs in a folder. `deadline` is the end of all of them, in `time.monotonic` seconds.

    `search` limits the search for the first wrong operation of a case, in seconds; None keeps the default.
    """

    out: Path
    timeout: float
    deadline: float
    escalate: bool = True
    search: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, job: Job) -> None:
        """Run a job. If its command ends early, run the rest one by one."""
        text = self._run_once(job)
        left = [plant for plant in job.plants if not self.has(plant, job.precision)]
        for plant in left:
            alone = job if len(job.plants) == 1 else Job(f"{job.name}-{plant.id}", (plant,), job.precision)
            said = text if alone is job else self._run_once(alone)
            if not self.has(plant, job.precision):
                over = time.monotonic() > self.deadline - 20
                last = " ".join(said.split())[-300:]
                why = "not run: no time is left" if over else f"the command ended without a result: {last}"
                self._keep(
                    plant, job.precision, [], said, [], 0.0, verdict="lost", reason=why, final=not over
                )

    def has(self, plant: Plant, precision: str) -> bool:
        """Return whether there is a result."""
        return result_path(self.out, plant, precision).is_file()

    def _run_once(self, job: Job) -> str:
        """Run the commands of a job, keep their results, and return what they printed."""
        if time.monotonic() > self.deadline - 20:
            return ""
        started = time.monotonic()
        way = job.plants[0].way
        commands = self._list_watch_commands(job) if way == "watch" else [self._make_command(job, way)]
        text = ""
        limit = MARGIN + self.timeout * len(job.plants)
        for command, env in commands:
            text += f"$ {shlex.join(command)}\n" + self._call(job, command, env, limit)
        seconds = time.monotonic() - started
        self._collect(job, text, [shlex.join(command) for command, _ in commands], seconds)
        return text

    def _make_command(self, job: Job, way: str) -> tuple[list[str], dict[str, str]]:
        stack = job.plants[0].stack
        folder = self.out / "cases" / stack
        files = [str(write_case(plant, folder)) for plant in job.plants]
        command = [sys.executable, "-m", "moeverify", way, *files]
        command += ["--json", str(self._work(job, "json")), "--goldens", str(self._goldens(job.plants[0]))]
        command += ["--cache", str(self.out / "cache"), "--timeout", f"{self.timeout:g}"]
        command += ["--no-require-goldens", "--no-github"]
        if way == "run":
            command += ["--keep", str(self._work(job, "keep"))]
            if not self.escalate:
                command += ["--no-escalate"]
            if self.search is not None:
                command += ["--explain-seconds", f"{self.search:g}"]
        if job.precision != "float64":
            command += ["--set", f"recipe.precision={job.precision}"]
        if job.plants[0].fault:
            command += ["--fault", job.plants[0].fault]
        return command, {}

    def _list_watch_commands(self, job: Job) -> list[tuple[list[str], dict[str, str]]]:
        """Return the commands that record a script on one device and on ranks, and the comparing command."""
        (plant,) = job.plants
        case = plant.case
        script = str(STACKS / case["script"])
        one, many = self._work(job, "one"), self._work(job, "many")
        for folder in (one, many):
            shutil.rmtree(folder, ignore_errors=True)
        watch = [sys.executable, "-m", "moeverify", "watch", "--steps", case.get("steps", "0-3"), "--out"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(plant.num_ranks)]
        alone = [sys.executable, script, *map(str, case.get("one", ()))]
        together = [*launcher, script, *map(str, case.get("many", ()))]
        compare = [sys.executable, "-m", "moeverify", "compare", str(one), str(many)]
        return [
            ([*watch, str(one), "--", *alone], dict(case.get("env_one", {}))),
            ([*watch, str(many), "--", *together], dict(case.get("env_many", {}))),
            ([*compare, "--json", str(self._work(job, "json"))], {}),
        ]

    def _goldens(self, plant: Plant) -> Path:
        return (plant.package or self.out) / "goldens"

    def _work(self, job: Job, kind: str) -> Path:
        folder = self.out / "work"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{job.name}.{kind}"

    def _call(self, job: Job, command: Sequence[str], env: Mapping[str, str], limit: float) -> str:
        """Run a command and return its output. At its limit, stop it by SIGINT and then by SIGKILL."""
        log = self._work(job, "log")
        folders = [folder.parents[1] for plant in job.plants for folder in plant.recipes]
        packages = [plant.package for plant in job.plants if plant.package]
        path = dict.fromkeys(map(str, [*packages, ROOT, STACKS, PLANTS, *folders]))
        full = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **{k: str(v) for k, v in env.items()}}
        full["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
        full.pop("CI", None)
        limit = max(1.0, min(limit, self.deadline - 12 - time.monotonic()))
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.out / "work",
                env=full,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                _stop(process)
            except BaseException:
                _stop(process)
                raise
        return log.read_text(errors="replace")

    def _collect(self, job: Job, text: str, commands: Sequence[str], seconds: float) -> None:
        """Keep each plant's available results: from the JSON, or the finished cases of a stopped command."""
        found = _read_cases(self._work(job, "json"), self._work(job, "keep"))
        for plant in job.plants:
            cases = [case for case in found if plant.way != "run" or case["name"] == plant.id]
            if not cases:
                continue
            alone = len(job.plants) == 1
            said = text if alone else cut_text(text, plant.id, [other.id for other in job.plants])
            self._keep(plant, job.precision, cases, said, commands, seconds)

    def _keep(
        self,
        plant: Plant,
        precision: str,
        cases: list[dict[str, Any]],
        text: str,
        commands: Sequence[str],
        seconds: float,
        *,
        verdict: str = "",
        reason: str = "",
        final: bool = True,
    ) -> None:
        failed = [case for case in cases if case["verdict"] in ("mismatch", "error")]
        lead = failed[0] if failed else cases[0] if cases else {}
        record = {
            "id": plant.id,
            "stack": plant.stack,
            "precision": precision,
            "held": plant.held,
            "clean": plant.is_clean,
            "way": plant.way,
            "sources": hash_sources(plant.stack),
            "verdict": verdict or lead["verdict"],
            "reason": reason or lead.get("reason", ""),
            "seconds": lead.get("seconds", seconds) if plant.way == "run" else seconds,
            "commands": list(commands),
            "case": shorten(lead) if lead else None,
        }
        name = result_path(self.out, plant, precision).stem
        if final:
            _write(self.out / "results" / f"{name}.json", json.dumps(record, indent=1))
        if text:
            _write(self.out / "text" / f"{name}.txt", text)
        if cases:
            path = self.out / "json" / f"{name}.json.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(path, "wt") as file:
                json.dump(cases, file)
        with self._lock:
            print(
                f"{record['verdict']:9} {name}  {record['seconds']:.0f} s  {record['reason'][:80]}",
                flush=True,
            )


@functools.cache
def hash_sources(stack: str) -> str:
    """Return a hash of a stack's code: line numbers in a result refer to this version of the code."""
    folder = PLANTS / stack if stack == BUILTIN else STACKS / stack
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def result_path(out: Path, plant: Plant, precision: str) -> Path:
    """Return the path of a plant's result file."""
    return out / "results" / f"{plant.id}--{precision}.json"


def write_case(plant: Plant, folder: Path) -> Path:
    """Write the case file of a plant, with the recipes that it may name beside it, and return it."""
    path = folder / f"{plant.id}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {**plant.case, "name": plant.id}
    temporary = path.with_suffix(f".{threading.get_ident()}.tmp")
    with temporary.open("w") as file:
        YAML(typ="safe").dump(data, file)
    temporary.replace(path)
    return path


def copy_recipes(plants: Sequence[Plant], out: Path) -> None:
    """Copy the recipes of all stacks, and the folders that they name, to the folder of their cases."""
    for stack in {plant.stack for plant in plants}:
        folder = out / "cases" / stack
        sources = dict.fromkeys(path for plant in plants if plant.stack == stack for path in plant.recipes)
        for source in reversed(list(sources)):  # the first one's files replace those of the others
            if source.is_dir():
                shutil.copytree(source, folder / "recipes", dirs_exist_ok=True)
        weights = HERE / "stacks" / stack / "weights"
        if weights.is_dir():
            shutil.copytree(weights, folder / "weights", dirs_exist_ok=True)


def cut_text(text: str, name: str, names: Sequence[str]) -> str:
    """Return the part about one case from a report of many cases."""
    head = re.compile(rf"^({'|'.join(map(re.escape, names))})  (\w+)  \d+ ranks?, ")
    kept, inside = [], False
    for line in text.splitlines():
        match = head.match(line)
        if match:
            inside = match.group(1) == name
        elif line.startswith(("note ", "goldens ", "moeverify ", "MISMATCH ", "ERROR ", "PASS ")):
            inside = False
        is_row = line.startswith(f"{name} ") or re.match(rf"^\[\d+/\d+\] \w+ +{re.escape(name)} ", line)
        is_note = line.startswith("note ") and re.search(rf"\b{re.escape(name)}[,:]", line)
        if inside or is_row or is_note:
            kept.append(line)
    return "\n".join(kept) + "\n" if kept else ""


def shorten(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case without dependent findings, trials, and data that only pictures need."""
    kept = {key: value for key, value in case.items() if key not in _LEFT_OUT}
    findings = case.get("findings", [])
    kept["findings"] = [
        {key: value for key, value in finding.items() if key != "trials"}
        for finding in findings
        if not finding.get("follows")
    ]
    kept["num_findings"] = len(findings)
    return kept


def make_jobs(plants: Sequence[Plant], precision: str, *, workers: int, most: int) -> list[Job]:
    """Return commands for plants, the longest first: cases of one stack share a command if possible."""
    alone = [plant for plant in plants if plant.way != "run" or plant.fault or plant.package]
    jobs = [Job(f"{plant.id}--{precision}", (plant,), precision) for plant in alone]
    groups: dict[tuple[str, int], list[Plant]] = {}
    for plant in plants:
        if plant not in alone:
            groups.setdefault((plant.stack, plant.num_ranks), []).append(plant)
    total = sum(map(len, groups.values()))
    share = total if workers == 1 else -(-total // (2 * workers))
    size = max(1, min(most, share))
    for (stack, ranks), members in sorted(groups.items()):
        for start in range(0, len(members), size):
            name = f"{stack}-{ranks}-{start}--{precision}"
            jobs.append(Job(name, tuple(members[start : start + size]), precision))
    return sorted(jobs, key=lambda job: -job.weight)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command: first so that it reports its results, then with all its processes."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_cases(result: Path, keep: Path) -> list[dict[str, Any]]:
    """Return the finished cases of a command from its JSON, and missing ones from the file of --keep."""
    found: dict[str, dict[str, Any]] = {}
    if keep.is_file():
        for line in keep.read_text().splitlines():
            try:
                case = json.loads(line).get("result")
            except (json.JSONDecodeError, AttributeError):
                continue
            if isinstance(case, dict):
                found[case["name"]] = case
    if result.is_file():
        try:
            cases = json.loads(result.read_text())["cases"]
        except (json.JSONDecodeError, KeyError):
            cases = []
        for case in cases:
            if case["verdict"] != "skipped":
                found[case["name"]] = case
    return list(found.values())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def print_table(out: Path, plants: Sequence[Plant], precision: str) -> None:
    """Print a row for each plant that has a result: verdict, seconds, and the leading finding."""
    from claims import order_findings

    rows = []
    for plant in plants:
        path = result_path(out, plant, precision)
        if not path.is_file():
            rows.append([plant.id, plant.stack, "held" if plant.held else "", "not run", "", ""])
            continue
        record = json.loads(path.read_text())
        findings = order_findings((record["case"] or {}).get("findings", []))
        said = (findings[0].get("cause") or findings[0]["check"]) if findings else record["reason"]
        held = "held" if plant.held else ""
        rows.append([plant.id, plant.stack, held, record["verdict"], f"{record['seconds']:.0f}", said[:110]])
    print(tabulate(rows, ["plant", "stack", "", "verdict", "s", "leads"], disable_numparse=True))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row[3]] = counts.get(row[3], 0) + 1
    print(f"\n{precision}: " + ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))


def main() -> int:
    """Run the selected plants. Returns 1 when a clean case does not pass, or a plant does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="ID", help="ids or globs of plants")
    parser.add_argument("--stack", nargs="*", default=[], help="stacks; all by default")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 3))
    parser.add_argument("--precision", default="float64", choices=PRECISIONS)
    parser.add_argument(
        "--every", action="store_true", help="run plants that do not name the precision, where it applies"
    )
    parser.add_argument(
        "--cases", nargs="+", type=Path, metavar="FILE", help="run these clean cases in place of the stacks'"
    )
    parser.add_argument(
        "--seeds", type=read_seeds, default=range(0), metavar="N", help="seeds 1 to N of each case, or A-B"
    )
    parser.add_argument("--clean", action="store_true", help="run the clean cases, and no plant")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--held", action="store_const", const="held", dest="group", help="held-out plants alone"
    )
    group.add_argument("--open", action="store_const", const="open", dest="group", help="all others")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that a case may take")
    parser.add_argument("--total", type=float, default=1e6, help="seconds that all may take")
    parser.add_argument("--together", type=int, default=12, help="most cases in one command")
    parser.add_argument("--no-escalate", dest="escalate", action="store_false")
    parser.add_argument("--explain-seconds", type=float, metavar="S", help="as of `moeverify run`")
    parser.add_argument("--folded", action="store_true", help="run plants without their switches (fold.py)")
    parser.add_argument("--list", action="store_true", help="only list the plants")
    options = parser.parse_args()
    plants = (
        list(map(read_case, options.cases))
        if options.cases is not None
        else choose(load_plants(options.stack), options.only, clean=options.clean, group=options.group or "")
    )
    if options.every:
        plants = [changed for plant in plants if (changed := adapt(plant, options.precision))]
    else:
        plants = [plant for plant in plants if options.precision in plant.precisions]
    plants = [seeded for plant in plants for seeded in vary_seed(plant, options.seeds)]
    if options.folded:
        folder = options.out.resolve() / "folded"
        plants = [folded for plant in plants if (folded := fold(plant, folder))]
    if options.list:
        rows = [[plant.id, plant.stack, "held" if plant.held else "", plant.source] for plant in plants]
        print(tabulate(rows, ["plant", "stack", "", "source"], disable_numparse=True))
        return 0
    out = options.out.resolve()
    for folder in ("work", "goldens", "cache", "results"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    copy_recipes(plants, out)
    runner = Runner(
        out, options.timeout, time.monotonic() + options.total, options.escalate, options.explain_seconds
    )
    left = [plant for plant in plants if options.again or not runner.has(plant, options.precision)]
    for plant in left:
        result_path(out, plant, options.precision).unlink(missing_ok=True)
    jobs = make_jobs(left, options.precision, workers=options.workers, most=options.together)
    for job in jobs:
        for kind in ("json", "keep"):
            (out / "work" / f"{job.name}.{kind}").unlink(missing_ok=True)
    print(
        f"{len(left)} of {len(plants)} to run in {len(jobs)} commands, {options.workers} at a time",
        flush=True,
    )
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for _ in pool.map(runner.run, jobs):
            pass
    print_table(out, plants, options.precision)
    bad = ("mismatch", "error", "lost") if options.clean or options.cases else ("pass", "lost")
    records = [result_path(out, plant, options.precision) for plant in plants]
    verdicts = [json.loads(path.read_text())["verdict"] if path.is_file() else "lost" for path in records]
    return int(any(verdict in bad for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
