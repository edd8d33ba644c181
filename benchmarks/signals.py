"""Signals at random moments of five commands: what is left behind, and whether a verdict is lost.

    python benchmarks/signals.py --moments 30 --workers 20 --out /tmp/signals

Each trial has folders of its own for temporary files, caches, goldens and reports. After the signal, no process of
the trial may be left; temporary folders must be gone, after SIGKILL when the next command starts; every verdict
that was printed must be in the files that keep it; and every file that is there must be readable. A SIGINT goes to
the process group in every second trial, as from a terminal, and always for `watch`, which leaves it to the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from moeverify.checksum import Damaged, open_line
from moeverify.errors import FormatError
from moeverify.report.formats.json import read_run
from moeverify.stale_folders import LOCK, remove_abandoned
from moeverify.verification.golden.file import read_golden

ROOT = Path(__file__).parents[1]
VARIABLE = "MOEVERIFY_SIGNALS_TRIAL"
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
END = {signal.SIGKILL: {-9}, signal.SIGINT: {130, -2}, signal.SIGTERM: {143, -15}}
PATIENCE = 90.0  # seconds until a command, and all of its processes, must have ended
LOCKS = 5.0  # seconds until the kernel has released the locks of killed processes
PRINTED = re.compile(
    r"^\[\d+/\d+\] (?:pass|mismatch|undecided|error)\s+(.+?)  ", re.IGNORECASE | re.MULTILINE
)
COMMANDS = {
    "run": [
        "run",
        "cases/ddp.yaml",
        "cases/fsdp2.yaml",
        "cases/tp.yaml",
        "--no-escalate",
        "--keep",
        "{}/journal",
    ],
    "reshard": ["reshard", "examples/reshard/fsdp2.yaml", "examples/reshard/fsdp1.yaml"],
    "watch": ["watch", "--out", "{}/recorded", "--"],
    "faults": [
        "faults",
        "run",
        "A01",
        "A03",
        "--without",
        "explain",
        "--no-escalate",
        "--markdown",
        "{}/faults.md",
    ],
    "golden": [
        "golden",
        "cases/ddp.yaml",
        "cases/fsdp2.yaml",
        "cases/gpt-ddp.yaml",
        "--goldens",
        "{}/golden",
    ],
}
TRAINING = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.1)
dist.destroy_process_group()
"""


@dataclass
class Trial:
    """One run of a command, the moment of its signal, and what was seen afterwards."""

    command: str
    signal: str
    number: int
    after: float
    ended: bool = False  # before the signal
    code: int | None = None
    seconds_to_end: float = 0.0
    printed: int = 0
    bad: tuple[str, ...] = ()


def make_words(name: str, folder: Path) -> list[str]:
    """Return the command line of a trial in this folder."""
    words = [word.replace("{}", str(folder)) for word in COMMANDS[name]]
    if name == "watch":
        (folder / "train.py").write_text(TRAINING)
        port = f"localhost:{random.randrange(20000, 60000)}"
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
        ]
        return [*words, *torchrun, "--rdzv-endpoint", port, str(folder / "train.py")]
    if name in ("run", "reshard"):
        words += ["--json", f"{folder}/out.json", "--out", f"{folder}/out"]
    return [*words, "--cache", f"{folder}/cache"]


def list_processes(mark: str) -> list[int]:
    """Return the processes, but for ended ones, that have inherited the mark of a trial."""
    entry = f"{VARIABLE}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry in (path / "environ").read_bytes().split(b"\0"):
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(path.name)] if state not in "ZX" else []
    return found


def wait_for_no_process(mark: str) -> str:
    """Return what is left of a trial after `PATIENCE`, and end it."""
    end = time.monotonic() + PATIENCE
    while (left := list_processes(mark)) and time.monotonic() < end:
        time.sleep(0.5)
    names = []
    for pid in left:
        with contextlib.suppress(OSError):
            names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:90])
            os.kill(pid, signal.SIGKILL)
    return f"processes left: {names}" if left else ""


def find_lost(trial: Trial, folder: Path, said: str) -> list[str]:
    """Return the verdicts that a command has printed and did not keep, and the files that cannot be read."""
    # A save of `reshard` is reported only if it fails.
    printed = {name.strip() for name in PRINTED.findall(said) if not name.startswith("save ")}
    trial.printed = len(printed)
    bad, kept = [], set()
    killed = trial.signal == "SIGKILL" and not trial.ended
    for path in (folder / "out.json", folder / "out" / "result.json"):
        try:
            if path.exists():
                kept = {case.name for case in read_run(path).cases if case.verdict != "skipped"}
                if printed - kept:
                    bad.append(f"{path.name} lacks {sorted(printed - kept)}")
        except FormatError as error:
            bad.append(f"{path.name} is unreadable: {error}")
    if trial.command in ("run", "reshard") and printed and not kept and not killed:
        bad.append(f"no report of {sorted(printed)}")
    journal = folder / "journal"
    if trial.command == "run" and printed:
        lines = journal.read_bytes().split(b"\n") if journal.exists() else []
        names = {json.loads(line).get("name", "").split(" ")[0] for line in lines[:-1] if line}
        if printed - names:
            bad.append(f"the journal lacks {sorted(printed - names)}")
    if trial.command == "faults" and printed and not killed and said.count("A0") <= len(printed):
        bad.append("no row for a finished fault")
    for path in (folder / "recorded").glob("*.jsonl"):
        try:
            [open_line(line) for line in path.read_bytes().split(b"\n")[:-1]]
        except Damaged as error:
            bad.append(f"{path.name}: {error}")
    for path in (folder / "golden").glob("*.json"):
        try:
            read_golden(path)
        except FormatError as error:
            bad.append(f"golden unreadable: {error}")
    return bad


def find_remains(trial: Trial, folder: Path) -> list[str]:
    """Return the temporary and partial files that a trial left behind."""
    scratch = folder / "tmp"
    if trial.signal == "SIGKILL" and not trial.ended:
        # A process that ends gives up its environment before its locks.
        end = time.monotonic() + LOCKS
        while list((folder / "cache").glob("*.partial")) and time.monotonic() < end:
            remove_abandoned((folder / "cache").glob("*.partial"))
            time.sleep(0.1)
        remove_abandoned(path.parent for path in scratch.glob(f"*/{LOCK}"))
    names = [
        path.name
        for path in scratch.iterdir()
        if not path.name.startswith(("torchinductor_", "torchelastic_"))
    ]
    names += [
        path.name
        for path in folder.rglob("*.partial")
        if trial.signal != "SIGKILL" or "saved" not in path.name
    ]
    return [f"files left: {names}"] if names else []


def run_trial(trial: Trial, out: Path) -> Trial:
    """Run a command, send its signal, and fill in what is left and lost."""
    mark = f"{os.getpid()}-{trial.command}-{trial.signal}-{trial.number}"
    with tempfile.TemporaryDirectory(prefix="signals-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), VARIABLE: mark, "OMP_NUM_THREADS": "1"}
        environment |= {"XDG_CACHE_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "moeverify", *make_words(trial.command, folder)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            started = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(trial.after)
            trial.ended = process.poll() is not None
            at = time.monotonic()
            if not trial.ended:
                number = signal.Signals[trial.signal]
                whole = number == signal.SIGINT and (trial.command == "watch" or trial.number % 2)
                (os.killpg if whole else os.kill)(process.pid, number)
            bad = []
            try:
                trial.code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                bad.append("did not end")
                process.kill()
            trial.seconds_to_end = round(time.monotonic() - (started if trial.ended else at), 1)
        bad.append(wait_for_no_process(mark))
        text = (folder / "said").read_text(errors="replace")
        if not trial.ended and "KeyboardInterrupt" in text and "moeverify/cli" not in text:
            return trial  # before the first line of moeverify ran
        if "fault of moeverify" in text or ("Traceback" in text and trial.command != "watch"):
            bad.append("traceback")
        ends = END[signal.Signals[trial.signal]] | {
            0,
            1 if trial.command == "watch" else 0,
        }  # a script has its own
        if not trial.ended and trial.code not in ends:
            bad.append(f"exit code {trial.code}")
        bad += find_lost(trial, folder, text) + find_remains(trial, folder)
        trial.bad = tuple(filter(None, bad))
        if trial.bad:
            keep = out / f"{trial.command}-{trial.signal}-{trial.number}.txt"
            keep.write_text(f"{trial}\n{text[-6000:]}")
    return trial


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=3, help="of each signal in each command")
    parser.add_argument("--workers", type=int, default=1, help="commands at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further trial after this time")
    parser.add_argument("--only", nargs="*", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end, dice = time.monotonic() + options.seconds, random.Random(options.seed)
    shared, rows = set(Path("/dev/shm").iterdir()), []
    pool = ThreadPoolExecutor(options.workers)

    def attempt(trial: Trial) -> Trial:
        if time.monotonic() < end:
            rows.append(run_trial(trial, options.out))
        return trial

    try:
        whole = list(pool.map(attempt, [Trial(name, "SIGKILL", -1, 600.0) for name in options.only]))
        lasts = {trial.command: trial.seconds_to_end for trial in whole}
        print("seconds of a whole command:", lasts, flush=True)
        trials = [
            Trial(name, number.name, moment, round(dice.uniform(0.0, 1.1) * lasts[name], 2))
            for moment in range(options.moments)
            for name in options.only
            for number in SIGNALS
        ]
        list(pool.map(attempt, trials))
    finally:  # an interrupt ends the measurement, not the report
        report(rows, options.out)
        print("left in /dev/shm:", sorted(set(Path("/dev/shm").iterdir()) - shared))
        print(f"{sum(bool(row.bad) for row in rows)} bad of {len(rows)}", flush=True)
        os._exit(0)


def report(rows: list[Trial], out: Path) -> None:
    """Write all trials, and print a line for each command and signal, and one for each bad trial."""
    (out / "signals.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    groups: dict[tuple[str, str], list[Trial]] = {}
    for row in rows:
        groups.setdefault((row.command, row.signal if row.number >= 0 else "none"), []).append(row)
    for (command, number), own in sorted(groups.items()):
        hit = [row for row in own if not row.ended]
        slowest = max((row.seconds_to_end for row in hit), default=0.0)
        words = f"{len(own)} trials, {len(hit)} hit before the end, {sum(row.printed > 0 for row in hit)} with rows"
        print(
            f"{command:8} {number:8} {words}, slowest end {slowest} s, {sum(bool(row.bad) for row in own)} bad"
        )
    for row in rows:
        if row.bad:
            print("BAD", row)


if __name__ == "__main__":
    main()
