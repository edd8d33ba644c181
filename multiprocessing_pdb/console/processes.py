"""The processes of a job on this machine, in any state."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

from multiprocessing_pdb.console.arming import ArmError, arm_process
from multiprocessing_pdb.console.stacks import dump_stacks
from multiprocessing_pdb.wire.identity import name_job, read_rank
from multiprocessing_pdb.wire.procfs import (
    find_ancestors,
    is_alive,
    read_command,
    read_environ,
    read_parent,
    read_start,
    send_signal,
)
from multiprocessing_pdb.wire.runtime_directory import (
    ARMED_SUFFIX,
    CONTROL_SUFFIX,
    STACKS_SUFFIX,
    RuntimeDirectory,
)

_MOST_TEXT = 100_000
_SUFFIXES = (ARMED_SUFFIX, CONTROL_SUFFIX, STACKS_SUFFIX)
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
    """Return the records of the armed processes on this machine. Remove records of dead processes."""
    armed = []
    with contextlib.suppress(OSError), RuntimeDirectory.open() as directory:
        for name, record in directory.records():
            if record.get("host") != socket.gethostname():
                continue  # several machines share the directory
            pid, start = record.get("pid"), record.get("start")
            if isinstance(pid, int) and isinstance(start, int) and is_alive(pid, start):
                armed.append(record)
            else:
                stem = name.removesuffix(ARMED_SUFFIX)
                written = record.get("stack_file")  # named before the rank was known
                for left in (*(stem + suffix for suffix in _SUFFIXES), written):
                    if isinstance(left, str) and left.endswith(_SUFFIXES) and "/" not in left:
                        directory.remove(left)
    return armed


def list_processes(job: str, action: str) -> list[ProcessInfo]:
    """Return {"pid", "start", "rank", "command"} of each process of a job.

    "stacks" adds the stacks as "text". "arm" arms the processes of unarmed ranks and returns only these,
    with an error message, if any, as "text". "kill" sends SIGKILL to each. Processes of ranks come first,
    in order. Launchers and helpers have no rank.
    """
    armed = {record["pid"]: record for record in read_armed() if record.get("job") == job}
    processes: list[ProcessInfo] = []
    for pid in sorted({*_find_processes(job), *armed}):
        with contextlib.suppress(OSError):
            start = read_start(pid)
            command = read_command(pid)
            rank = armed[pid].get("number") if pid in armed else read_rank(read_environ(pid))[0]
            processes.append({"pid": pid, "start": start, "rank": rank, "command": command[:200]})
    if action == "stacks":
        from concurrent.futures import ThreadPoolExecutor  # which imports the logging module

        with ThreadPoolExecutor(4) as pool:
            texts = pool.map(
                lambda process: dump_stacks(process["pid"], armed.get(process["pid"])), processes
            )
        processes = [
            {**process, "text": text[:_MOST_TEXT]} for process, text in zip(processes, texts, strict=True)
        ]
    elif action == "arm":
        processes = _arm_ranks([process for process in processes if process["pid"] not in armed])
    elif action == "kill":
        ancestors = find_ancestors()
        processes = [process for process in processes if process["pid"] not in ancestors]
        for process in processes:
            send_signal(process["pid"], process["start"], signal.SIGKILL)
    return sorted(processes, key=lambda p: (p["rank"] is None, p["rank"] or 0, p["pid"]))


def _arm_ranks(processes: list[ProcessInfo]) -> list[ProcessInfo]:
    """Arm the processes of ranks, but not their children, such as data loader workers with the same rank."""
    ranks = {process["pid"]: process["rank"] for process in processes if process["rank"] is not None}
    chosen = [p for p in processes if p["pid"] in ranks and ranks.get(read_parent(p["pid"])) != p["rank"]]
    for process in chosen:
        try:
            arm_process(process["pid"])
            process["text"] = ""
        except (ArmError, OSError) as error:
            process["text"] = str(error)
    return chosen
