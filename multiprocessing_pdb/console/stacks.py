"""Stacks of any process of a job: from py-spy, from the process itself, or from faulthandler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from multiprocessing_pdb.console.link import LinkClosedError, connect_local, wait
from multiprocessing_pdb.wire.identity import FileOwner
from multiprocessing_pdb.wire.procfs import send_signal
from multiprocessing_pdb.wire.runtime_directory import CONTROL_SUFFIX, SOCKET_SUFFIX, RuntimeDirectory

_DUMP_SECONDS = 20.0
_ASK_SECONDS = 2.0
_THREAD = re.compile(r"^Thread (?:0x)?[0-9A-Fa-f]+( \([\w+]+\))(?:: (.*))?")
_HINT = "for any process at any time: pip install py-spy"


def dump_stacks(pid: int, record: dict[str, Any] | None) -> str:
    """Return the stacks of a process, or why there are none. `record` was written when it was armed.

    py-spy works for every process. The server of a stopped or armed process answers, unless a call into C
    holds the interpreter lock. In that case faulthandler works for an armed process. MPDB_STACKS=self or
    faulthandler skips the earlier methods, and MPDB_STACKS=py-spy names the first.
    """
    way = os.environ.get("MPDB_STACKS", "")
    problem = "py-spy is not installed"
    if way in ("", "py-spy"):
        text, problem = _run_py_spy(pid)
        if text:
            return text
    if way != "faulthandler":
        text = _ask_process(pid)
        if text:
            return text
    if record is not None and isinstance(record.get("stack_signal"), int):
        return _ask_faulthandler(pid, record)
    return f"no stacks: {problem}, and the process is neither stopped nor armed ({_HINT})"


def _run_py_spy(pid: int) -> tuple[str, str]:
    """Return the stacks, or an empty text and an error message."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_DUMP_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode == 0:
        return _trim(done.stdout), ""
    return "", (done.stderr.strip().splitlines() or ["py-spy failed"])[-1]


def _trim(text: str) -> str:
    """Remove parts that differ between processes: py-spy's header and thread ids."""
    lines = [line for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("Process ", "Python v"))]
    return "\n".join(_THREAD.sub(r"Thread\1 \2", line) for line in kept)


def _ask_process(pid: int) -> str:
    """Return the stacks from the process itself, or an empty text if it does not answer in time."""
    try:
        with RuntimeDirectory.open() as directory:
            names = [*directory.names(SOCKET_SUFFIX), *directory.names(CONTROL_SUFFIX)]
            for name in names:
                if FileOwner.parse(name.rpartition(".")[0]).pid == pid:
                    return _ask_server(directory, name)
    except (OSError, LinkClosedError):
        pass
    return ""


def _ask_server(directory: RuntimeDirectory, name: str) -> str:
    link = connect_local(directory, name)
    try:
        link.send({"do": "stacks", "id": 1})
        deadline = time.monotonic() + _ASK_SECONDS
        while not link.inbox and not link.closed and time.monotonic() < deadline:
            wait([link], deadline - time.monotonic())
        return str(link.inbox[0].get("text", "")) if link.inbox else ""
    finally:
        link.close()


def _ask_faulthandler(pid: int, record: dict[str, Any]) -> str:
    """Send an armed process's faulthandler signal, and return the dump."""
    name = str(record["stack_file"])
    try:
        with RuntimeDirectory.open() as directory:
            before = len(directory.read_text(name, 1 << 24))
            if not send_signal(pid, int(record["start"]), int(record["stack_signal"])):
                return "no stacks: the process has ended"
            text, deadline = "", time.monotonic() + 3.0
            while time.monotonic() < deadline:
                grown = directory.read_text(name, 1 << 24)[before:]
                if grown and grown == text:
                    return grown
                text = grown
                time.sleep(0.05)
    except OSError as error:
        return f"no stacks: {error}"
    return text or "no stacks: faulthandler wrote nothing in 3 s"
