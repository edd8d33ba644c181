"""`arm PID`: arms a running process that never called arm(), with sys.remote_exec of Python 3.14.

The process reads and runs a script at its next bytecode in the main thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from multiprocessing_pdb.wire.identity import FileOwner
from multiprocessing_pdb.wire.procfs import is_alive, read_environ, read_start
from multiprocessing_pdb.wire.runtime_directory import (
    CONTROL_SUFFIX,
    SCRIPT_SUFFIX,
    VARIABLE,
    RuntimeDirectory,
    runtime_path,
)

_ARM_SECONDS = 30.0  # includes slow imports on a busy node
_POLL_SECONDS = 0.02

# The script removes itself last. While it exists no second script is written, which would run in the middle
# of the first one's imports. Python prints exceptions of the script to the program's stderr.
_SCRIPT = """\
def _arm():
    import os, sys
    sys.path.append({folder!r})
    try:
        import multiprocessing_pdb
        multiprocessing_pdb.arm()
    finally:
        sys.path.remove({folder!r})
        os.unlink({script!r})
_arm()
del _arm
"""


class ArmError(RuntimeError):
    """A process that cannot be armed from outside. The message contains the reason and a remedy."""


def arm_process(pid: int) -> str:
    """Arm a running process of this user, and return the name of its job. Raises ArmError.

    Both Pythons must be 3.14 or later with the same minor version, and ptrace of the process must be
    allowed.
    """
    if not hasattr(sys, "remote_exec"):
        raise ArmError(
            f"this console runs on Python {sys.version_info[0]}.{sys.version_info[1]}; only Python 3.14 and later"
            " reach a process that has not called arm(). Call multiprocessing_pdb.arm() in the program before;"
            " `stacks` shows any process with py-spy installed"
        )
    start = read_start(pid)
    if not is_alive(pid, start):
        raise ArmError(f"there is no process {pid}")
    owner = Path(f"/proc/{pid}").stat().st_uid
    if owner != os.geteuid():
        raise ArmError(f"process {pid} belongs to user {owner}")
    directory = read_environ(pid).get(VARIABLE) or f"/tmp/mpdb-{os.geteuid()}"
    if Path(directory) != runtime_path():
        raise ArmError(
            f"process {pid} has its sockets in {directory}; start the console with {VARIABLE}={directory}"
        )
    with RuntimeDirectory.open(create=True) as opened:
        _remove_scripts_of_the_dead(opened)
        known = _find_job(opened, pid, start)
        if known:
            return known
        name = f"arm+{pid}+{pid}-{start}{SCRIPT_SUFFIX}"
        with contextlib.suppress(FileExistsError):  # requested earlier, and not yet run
            _ask(opened, name, pid)
        return _await_job(opened, pid, start, name)


def _remove_scripts_of_the_dead(directory: RuntimeDirectory) -> None:
    for name in directory.names(SCRIPT_SUFFIX):
        owner = FileOwner.parse(name.removesuffix(SCRIPT_SUFFIX))
        if not is_alive(owner.pid, owner.start):
            directory.remove(name)


def _ask(directory: RuntimeDirectory, name: str, pid: int) -> None:
    path = str(directory.path.resolve() / name)
    folder = str(Path(__file__).resolve().parents[2])
    with os.fdopen(directory.create(name), "w", encoding="utf-8") as script:
        script.write(_SCRIPT.format(script=path, folder=folder))
    try:
        _run_in(pid, path)
    except BaseException:
        directory.remove(name)
        raise


def _run_in(pid: int, path: str) -> None:
    try:
        sys.remote_exec(pid, path)  # type: ignore[attr-defined]  # the checkers assume Python 3.11
    except PermissionError:
        raise ArmError(
            f"ptrace of process {pid} is not allowed here: see /proc/sys/kernel/yama/ptrace_scope and the"
            " container's capabilities (SYS_PTRACE)"
        ) from None
    except (OSError, RuntimeError) as error:
        raise ArmError(
            f"process {pid} takes no script: {error}; it has to run Python"
            f" {sys.version_info[0]}.{sys.version_info[1]} as this console does, and not with"
            " PYTHON_DISABLE_REMOTE_DEBUG"
        ) from None


def _find_job(directory: RuntimeDirectory, pid: int, start: int) -> str:
    owners = (FileOwner.parse(n.removesuffix(CONTROL_SUFFIX)) for n in directory.names(CONTROL_SUFFIX))
    return next((owner.job for owner in owners if (owner.pid, owner.start) == (pid, start)), "")


def _await_job(directory: RuntimeDirectory, pid: int, start: int, script: str) -> str:
    deadline = time.monotonic() + _ARM_SECONDS
    while time.monotonic() < deadline and is_alive(pid, start):
        job = _find_job(directory, pid, start)
        if job:
            return job
        time.sleep(_POLL_SECONDS)
    if not is_alive(pid, start):
        directory.remove(script)
        raise ArmError(f"process {pid} has ended")
    if script in directory.names(SCRIPT_SUFFIX):
        raise ArmError(
            f"process {pid} was asked and has not come to it in {_ARM_SECONDS:g} s: a call into C has to end first;"
            " `ls` shows it once it is armed"
        )
    raise ArmError(f"process {pid} could not arm itself; its stderr says why")
