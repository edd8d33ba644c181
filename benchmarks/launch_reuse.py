"""Savings of one launch for all cases: the suite at once, against one launch of ranks for each case.

python benchmarks/launch_reuse.py [--cases 6] [--cache DIR] [--no-torchrun]

Three ways run the same cases in one invocation, with full goldens made before the timing.

- `together`: one `moeverify run CASE...`
- `alone`: one `moeverify run CASE` for each case
- `torchrun`: `torchrun --standalone --nproc-per-node RANKS -m moeverify run CASE` for each case

In addition, `training` is torchrun over a script that trains the case once and compares nothing. It is a
lower bound for a launch per case. Without --cases, all of cases/*.yaml that can run here; cases without
their package or a GPU are left out and listed. Seconds are wall time, and user plus system time of all
processes.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from output import print_setting, print_table

ROOT = Path(__file__).resolve().parents[1]
MARK = "split "


def choose(cases, num_cases):
    """Return this many of the cases, spread evenly from the fewest ranks to the most."""
    ordered = sorted(cases, key=lambda case: (case.layout.world_size, case.name))
    if not num_cases or num_cases >= len(ordered):
        return ordered
    last = len(ordered) - 1
    return [ordered[round(place * last / max(1, num_cases - 1))] for place in range(num_cases)]


def leave_out(cases):
    """Return the cases that can run on this machine; print the others, and why they cannot."""
    from moeverify.cases.validation.choices import find_obstacle
    from moeverify.report.words.note import describe_obstacle

    reasons = {case.name: find_obstacle(case, "cpu", "gloo") for case in cases}
    for name, reason in reasons.items():
        if reason:
            print(f"left out: {name}: {describe_obstacle(reason)}")
    return [case for case in cases if not reasons[case.name]]


def time_command(command):
    """Return (wall seconds, CPU seconds of the command and of its children, its output)."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, check=False)
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, done.stdout


def verify_command(files, cache):
    """Return the command that verifies these files' cases, without wider precisions, as under torchrun."""
    options = ["--device", "cpu", "--cache", str(cache), "--no-escalate", "-q"]
    return [sys.executable, "-m", "moeverify", "run", *files, *options]


def torchrun_command(case, script):
    """Return the command that runs a script or module on the ranks of a case."""
    ranks = str(case.layout.world_size)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return [sys.executable, *start, *script]


def split_alone(case, cache):
    """Return the seconds per phase of one case in a separate launch, in order."""
    from moeverify.verification.controller.options import RunOptions
    from moeverify.verification.controller.run import run_cases

    options = RunOptions(device="cpu", golden_folder=ROOT / "golden", cache_folder=cache)
    begun, seen = time.monotonic(), {}
    run_cases([case], options, lambda event: seen.setdefault(event.kind, time.monotonic() - begun))
    ended = time.monotonic() - begun
    return {
        "until the ranks are up": seen["golden"],
        "check of the cached golden": seen["case-start"] - seen["golden"],
        "case": seen["case-end"] - seen["case-start"],
        "end of the ranks": ended - seen["case-end"],
    }


def train_plain(file):
    """On a rank under torchrun: train the case as a user would, without a golden; rank 0 prints a split."""
    begun = time.monotonic()
    import torch
    import torch.distributed as dist

    from moeverify.cases.validation.load import load_cases
    from moeverify.parallel.meshes import build_meshes
    from moeverify.train.assemble import assemble_parallel
    from moeverify.train.loop import train

    imported = time.monotonic()
    dist.init_process_group("gloo")
    (case,) = load_cases([Path(file)])
    device = torch.device("cpu")
    program = assemble_parallel(case.recipe, case.layout, build_meshes(case.layout, "cpu"), device)
    assembled = time.monotonic()
    train(case.recipe, program, Nobody())
    trained = time.monotonic()
    if dist.get_rank() == 0:
        split = {"import": imported - begun, "assemble": assembled - imported, "train": trained - assembled}
        print(MARK + json.dumps(split), flush=True)
    dist.destroy_process_group()


class Nobody:
    """An observer that ignores everything."""

    def observe(self, step, kind, name, local, region):
        """Ignore the tensor."""

    def begin_step(self, step):
        """Do nothing."""


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=0, help="only so many, spread over the rank counts")
    parser.add_argument("--cache", type=Path, default=None, help="folder of full goldens")
    parser.add_argument("--no-torchrun", action="store_true", help="leave out the two ways with torchrun")
    parser.add_argument("--train", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_plain(options.train)
        return
    from moeverify.cases.validation.load import load_cases
    from moeverify.verification.controller.machine import default_cache

    print_setting()
    cache = options.cache or default_cache()
    cases = choose(leave_out(load_cases(sorted((ROOT / "cases").glob("*.yaml")))), options.cases)
    files = [str(Path(case.file.partition(":")[0])) for case in cases]
    smallest = {}
    for case, file in zip(cases, files, strict=True):
        smallest.setdefault(case.recipe.fingerprint(), file)
    time_command(verify_command(list(smallest.values()), cache))  # goldens, and files of the system's cache
    ways = measure(cases, files, cache, with_torchrun=not options.no_torchrun)
    report(cases, ways)
    case = cases[len(cases) // 2]
    rows = [("alone", part, f"{seconds:.2f}") for part, seconds in split_alone(case, cache).items()]
    if "training" in ways:
        split = ways["training"][cases.index(case)][2]
        rows += [("training, rank 0", part, f"{seconds:.2f}") for part, seconds in split.items()]
    print_table(("way", "part", "s"), rows, f"{case.name} on {case.layout.world_size} ranks:")


def measure(cases, files, cache, *, with_torchrun):
    """Return, for each way, a list of (wall, CPU, split) with one entry per launch."""
    ways = {"together": [(*time_command(verify_command(files, cache))[:2], {})], "alone": []}
    if with_torchrun:
        ways |= {"torchrun": [], "training": []}
    for case, file in zip(cases, files, strict=True):
        ways["alone"].append((*time_command(verify_command([file], cache))[:2], {}))
        if with_torchrun:
            module = verify_command([file], cache)[1:]
            ways["torchrun"].append((*time_command(torchrun_command(case, module))[:2], {}))
            script = [str(Path(__file__)), "--train", file]
            wall, cpu, output = time_command(torchrun_command(case, script))
            line = next(line for line in output.splitlines() if line.startswith(MARK))
            ways["training"].append((wall, cpu, json.loads(line.removeprefix(MARK))))
    return ways


def report(cases, ways):
    """Print the seconds of every way, relative to one launch."""
    ranks = sorted(case.layout.world_size for case in cases)
    wall_together, cpu_together, _ = ways["together"][0]
    rows = []
    for way, launches in ways.items():
        wall, cpu = sum(launch[0] for launch in launches), sum(launch[1] for launch in launches)
        ratios = (f"{wall / wall_together:.2f} x", f"{cpu / cpu_together:.2f} x")
        rows.append((way, str(len(launches)), f"{wall:.1f}", ratios[0], f"{cpu:.1f}", ratios[1]))
    title = f"{len(cases)} cases on {', '.join(map(str, ranks))} ranks:"
    print_table(("way", "launches", "wall s", "of together", "CPU s", "of together"), rows, title)


if __name__ == "__main__":
    main()
