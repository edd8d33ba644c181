"""The census of a job on this machine: its Python processes, stopped or not, and their stacks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from multiprocessing_pdb.wire.identity import name_job, read_rank
from multiprocessing_pdb.wire.procfs import find_ancestors, is_alive, read_environ
from multiprocessing_pdb.wire.runtime_directory import ARMED_SUFFIX, RuntimeDirectory

_DUMP_SECONDS = 20.0
_THREAD = re.compile(r"^Thread (?:0x)?[0-9A-Fa-f]+( \([\w+]+\))(?:: (.*))?")
_MOST_TEXT = 100_000
ProcessInfo = dict[str, Any]


def _find_processes(job: str) -> list[int]:
    """Return the pids of this user's Python processes that belong to `job`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            if (
                entry.stat().st_uid != os.geteuid()
                or "python" not in Path(f"/proc/{pid}/exe").readlink().name
            ):
                continue
            if name_job(read_environ(pid), os.getpgid(pid)) == job:
                found.append(pid)
    return sorted(found)


def read_armed() -> list[ProcessInfo]:
    """Return the records of armed processes; those of processes that are gone are removed."""
    armed = []
    with contextlib.suppress(OSError), RuntimeDirectory.open() as directory:
        for name, record in directory.records():
            pid = record.get("pid")
            if isinstance(pid, int) and is_alive(pid):
                armed.append(record)
            else:
                directory.remove(name)
                directory.remove(name.removesuffix(ARMED_SUFFIX) + ".stacks")
    return armed


def list_processes(job: str, action: str) -> list[ProcessInfo]:
    """Return {"pid", "rank", "command"} of each process of a job, and for "stacks" its stacks in "text".

    "kill" sends SIGKILL to each. Ranks come first, in order; launchers and helpers have no rank.
    """
    armed = {record["pid"]: record for record in read_armed() if record.get("job") == job}
    processes = []
    for pid in sorted({*_find_processes(job), *armed}):
        with contextlib.suppress(OSError):
            command = (
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
            rank = armed[pid].get("number") if pid in armed else read_rank(read_environ(pid))[0]
            processes.append({"pid": pid, "rank": rank, "command": command.strip()[:200]})
    if action == "stacks":
        with ThreadPoolExecutor(4) as pool:
            texts = pool.map(lambda process: _dump(process["pid"], armed.get(process["pid"])), processes)
        processes = [
            {**process, "text": text[:_MOST_TEXT]} for process, text in zip(processes, texts, strict=True)
        ]
    elif action == "kill":
        ancestors = find_ancestors()
        processes = [process for process in processes if process["pid"] not in ancestors]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process["pid"], signal.SIGKILL)
    return sorted(processes, key=lambda p: (p["rank"] is None, p["rank"] or 0, p["pid"]))


def _dump(pid: int, record: ProcessInfo | None) -> str:
    """Return the stacks of a process, which need not answer anything: by py-spy, else by faulthandler."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    problem = "py-spy is not installed"
    if program is not None and os.environ.get("MPDB_STACKS") != "faulthandler":
        try:
            done = subprocess.run(
                [program, "dump", "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=_DUMP_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode == 0:
                return _trim(done.stdout)
            problem = (done.stderr.strip().splitlines() or ["py-spy failed"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    if record is not None and isinstance(record.get("stack_signal"), int):
        return _ask_faulthandler(pid, record)
    return f"no stacks: {problem}, and the process is not armed"


def _trim(text: str) -> str:
    """Drop what differs from process to process: py-spy's head and the numbers of threads."""
    lines = [line for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("Process ", "Python v"))]
    return "\n".join(_THREAD.sub(r"Thread\1 \2", line) for line in kept)


def _ask_faulthandler(pid: int, record: ProcessInfo) -> str:
    """Send the signal that an armed process gave to faulthandler, and return what it writes."""
    name = str(record["stack_file"])
    try:
        with RuntimeDirectory.open() as directory:
            before = len(directory.read_text(name, 1 << 24))
            os.kill(pid, int(record["stack_signal"]))
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
