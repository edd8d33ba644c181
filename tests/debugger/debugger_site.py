"""Real processes for the debugger's tests: ranks and consoles, in one runtime directory per test."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pexpect
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
PATIENCE = float(os.environ.get("MPDB_TEST_PATIENCE", "60"))
COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def poll(condition, what, seconds=PATIENCE):
    """Return the first true result of `condition`, or fail after the timeout."""
    deadline = time.monotonic() + seconds
    pause = 0.02
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)  # a condition may start a console, which slows down what it waits for
    pytest.fail(f"waited {seconds} s for {what}")


class Site:
    """A runtime directory, the processes started in it, and methods to query them."""

    def __init__(self, home, python):
        self.home = home
        self.python = python  # a Python that has imported torch
        self.runtime = home / "run"
        self.job = home.name  # unique on this machine: killing a job looks at all processes of the user
        self.processes = []
        self.consoles = []
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MPDB_", "PYTEST_", "COV_"))},
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": str(home),
            "TERM": "dumb",
            "MPDB_DIR": str(self.runtime),
        }
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "PYTHONBREAKPOINT"):
            self.env.pop(name, None)

    def start(self, *command, env=None, name="out", **options):
        """Start a process in its own session; its output goes to files in the site."""
        files = {s: (self.home / f"{name}.{s}").open("w") for s in ("stdout", "stderr")}
        options = {"stdin": subprocess.DEVNULL, **files, **options}
        started = subprocess.Popen(
            [str(part) for part in command],
            env={**self.env, **(env or {})},
            start_new_session=True,
            cwd=self.home,
            **options,
        )
        for file in files.values():
            file.close()
        self.processes.append(started)
        return started

    def start_python(self, program, *arguments, imports_torch=False, **options):
        """Start one of the programs beside this file, or any path. Those that import torch are forked."""
        python = self.python.command() if imports_torch else [sys.executable]
        return self.start(*python, PROGRAMS / program, *arguments, **options)

    def start_ranks(self, world, program, *arguments, env=None, **options):
        """Start `world` processes of one job, each with its rank in the environment."""
        place = {"WORLD_SIZE": str(world), "MPDB_JOB": self.job, **(env or {})}
        return [
            self.start_python(
                program, *arguments, env={"RANK": str(rank), **place}, name=f"rank{rank}", **options
            )
            for rank in range(world)
        ]

    def read(self, name="out", stream="stdout"):
        """Return the output of a process."""
        return (self.home / f"{name}.{stream}").read_text()

    def run_console(self, *commands, options=(), env=None, stdin=None, timeout=PATIENCE):
        """Run a console to its end, with `-c` for each command or with `stdin` as input."""
        line = [sys.executable, "-m", "multiprocessing_pdb", *map(str, options)]
        for command in commands:
            line += ["-c", command]
        return subprocess.run(
            line,
            env={**self.env, **(env or {})},
            cwd=self.home,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def ask(self, *commands, **options):
        """Return the console's output for the commands."""
        done = self.run_console(*commands, **options)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def await_ranks(self, count):
        """Wait until `count` ranks are stopped."""
        done = self.run_console(f"wait {count} {PATIENCE}", timeout=PATIENCE + 30)
        assert done.returncode == 0, done.stdout + done.stderr + self.explain()
        return done.stdout

    def explain(self):
        """Return the output of every process, for a failure message."""
        return "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(self.home.glob("*.std*")))

    def open_terminal(self, *command, env=None):
        """Return a pexpect child in a pty."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forkpty in a process with threads
            child = pexpect.spawn(
                str(command[0]),
                [str(part) for part in command[1:]],
                env={**self.env, **(env or {})},
                cwd=str(self.home),
                encoding="utf-8",
                timeout=PATIENCE / 2,
                dimensions=(40, 200),
            )
        child.delaybeforesend = None
        self.consoles.append(child)
        return child

    def open_console(self, *options, env=None):
        """Return a console in a pty, at its prompt."""
        child = self.open_terminal(sys.executable, "-m", "multiprocessing_pdb", *options, env=env)
        child.expect_exact("mpdb> ")
        return child

    def await_exit(self, process, code=0):
        """Wait for a process and check its exit code."""
        try:
            found = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail("the process does not end" + self.explain())
        assert found == code, self.explain()

    def sockets(self):
        """Return the names of the socket files."""
        return sorted(p.name for p in self.runtime.glob("*.sock")) if self.runtime.exists() else []

    def clean(self):
        """End everything that was started here, including child processes."""
        for child in self.consoles:
            child.close(force=True)
        for process in self.processes:
            try:
                family = psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                family = []
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait(PATIENCE)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
