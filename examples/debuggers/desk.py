"""Terminals of one debugger trial, the lines typed into them, and the programs under test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pexpect

HERE = Path(__file__).resolve().parent
WORLD = 4
PATIENCE = 120.0
SHORT = 15.0  # seconds to wait for a debugger that may never respond
SETTLE = 5.0  # after the process group is up, until all ranks are where they stop or hang
PROMPT = r"\(Pdb(?:\+\+)?\) "  # pdbpp replaces pdb where it is installed
COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")
BIAS = re.compile(r"tensor\(\[([^\]]*)\]\)")


class FailedError(Exception):
    """The debugger did not do the task; the message gives the reason."""


class Desk:
    """The terminals of one trial, and the number of lines typed into them."""

    def __init__(self, python: str, python314: str) -> None:
        self.python, self.python314 = python, python314
        self.typed: list[str] = []
        self.children: list[pexpect.spawn] = []
        self.job = ""

    def start(self, command: str, *, is_step: bool = True) -> pexpect.spawn:
        """Open a terminal with a command. It counts as a step only if the debugger requires it."""
        if is_step:
            self.typed.append(command)
        paths = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TERM": "dumb", "MPDB_JOB": "tasks"}
        child = pexpect.spawn(
            "/bin/sh", ["-c", f"exec {command}"], env=env, cwd=str(HERE), encoding="utf-8", timeout=PATIENCE
        )
        child.delaybeforesend = None
        child.setwinsize(40, 300)
        self.children.append(child)
        return child

    def train(self, task: str, debugger: str, *, python: str = "", steps: int = 3) -> pexpect.spawn:
        """Start the program under torchrun."""
        python = python or self.python
        flags = f"--nproc-per-node {WORLD} --master-port 29533"
        child = self.start(
            f"{python} -m torch.distributed.run {flags} tasks.py {task} {debugger} {steps}", is_step=False
        )
        for _ in range(WORLD):
            self.expect(child, "ready")
        time.sleep(SETTLE)
        return child

    def send(self, child: pexpect.spawn, line: str, expected: str, seconds: float = PATIENCE) -> str:
        """Type a line and return the output before `expected`. Raises FailedError."""
        self.typed.append(line)
        child.sendline(line)
        return self.expect(child, expected, seconds)

    def expect(self, child: pexpect.spawn, expected: str, seconds: float = PATIENCE) -> str:
        """Return a terminal's output before `expected`. Raises FailedError."""
        try:
            child.expect(expected, timeout=seconds)
        except pexpect.TIMEOUT:
            raise FailedError(f"no answer in {seconds:.0f} s") from None
        except pexpect.EOF:
            lines = [line for line in COLOR.sub("", child.before).splitlines() if line.strip()]
            raise FailedError(f"it ended: {lines[-1] if lines else 'nothing said'}") from None
        return COLOR.sub("", str(child.before))

    def find_ranks(self) -> list[int]:
        """Return the pids of the ranks, in order."""
        deadline = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < deadline:
            found = self._list_ranks()
            if len(found) == WORLD:
                return [found[rank] for rank in range(WORLD)]
            time.sleep(0.2)
        raise FailedError("the ranks did not start")

    def _list_ranks(self) -> dict[int, int]:
        """Return the pids of the running ranks; the launcher has no RANK."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, KeyError):
                environ = (entry / "environ").read_bytes().split(b"\0")
                named = dict(pair.split(b"=", 1) for pair in environ if b"=" in pair)
                if b"tasks.py" in (entry / "cmdline").read_bytes() and named.get(b"MPDB_JOB") == b"tasks":
                    found[int(named[b"RANK"])] = int(entry.name)
        return found

    def close(self) -> None:
        """End everything that was started."""
        for pid in self._list_ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.close(force=True)


def name_odd_one(values: list[str]) -> str:
    """Return the rank whose value differs, as seen by a user who has all values. Raises FailedError."""
    odd = [rank for rank, value in enumerate(values) if values.count(value) == 1]
    if len(values) != WORLD or len(odd) != 1:
        raise FailedError(f"the values do not say which rank: {values}")
    return f"rank {odd[0]}"


def read_bias(text: str) -> str:
    """Return the printed tensor. Raises FailedError."""
    found = BIAS.findall(text)
    if not found:
        raise FailedError(f"no tensor was printed: {text.strip()[-80:]!r}")
    return str(found[-1])


def find_line(text: str) -> int:
    """Return the line of the program that contains a text."""
    lines = (HERE / "tasks.py").read_text().splitlines()
    return next(at for at, line in enumerate(lines, 1) if text in line)
