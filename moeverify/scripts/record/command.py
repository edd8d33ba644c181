"""Execution of a user's command whose processes record their training. No torch."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from moeverify.checksum import Damaged, open_line
from moeverify.errors import CaseError, Problem
from moeverify.scripts.record.hangs import HangReporter
from moeverify.scripts.record.lines import LINES, ScriptEnd
from moeverify.scripts.record.settings import RANK_FILE
from moeverify.verification.launch.clock import ProcessTree
from moeverify.verification.launch.die_with_parent import die_with

_STARTUP = Path(__file__).parents[1] / "startup"
_ROOT = Path(__file__).parents[3]
_PERIOD = 0.5  # seconds between two calls of `look`
_END_GRACE = 45.0  # seconds; torchrun itself gives its ranks 30


def run_command(
    command: Sequence[str],
    variables: Mapping[str, str],
    hangs: HangReporter,
    look: Callable[[], bool] = lambda: False,
) -> int:
    """Run the command until it ends and return its exit code, or 128 + n if signal n ended it.

    `variables` are environment variables with the settings for its processes. `look` is called periodically
    and ends the command by returning True, as does `hangs`. The command's output is not redirected. SIGTERM and
    SIGHUP are forwarded to the command, which decides how to handle them. After both, processes that outlive the
    command are ended. The command gets SIGTERM if this process is killed.

    Raises: CaseError when the command cannot be started.
    """
    environment = {**os.environ, **variables, **hangs.variables}
    # Our startup folder comes first, so that Python finds its `sitecustomize`; the package comes after the
    # script's.
    paths = [str(_STARTUP), os.environ.get("PYTHONPATH", ""), str(_ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        watcher = os.getpid()
        process = subprocess.Popen(
            list(command),
            env=environment,
            preexec_fn=lambda: die_with(watcher, signal.SIGTERM),  # noqa: PLW1509  # no other thread runs
        )
    except OSError as error:
        problem = Problem(
            f"cannot run `{command[0]}`: {error.strerror or error}", remedy="give a command after `--`"
        )
        raise CaseError([problem]) from error
    hangs.processes.root = process.pid
    processes = _Processes(hangs.processes)

    def forward(number: int, frame: object) -> None:
        processes.hold()
        process.send_signal(number)

    kept = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGHUP)}
    # The terminal also sends Ctrl-C to the command.
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = _wait(process, processes, hangs, look)
        processes.end()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    code = 128 - code if code < 0 else code
    hangs.end(code)
    return code


def count_steps(folder: Path) -> dict[int, int | None]:
    """Return the number of optimizer steps of each rank of a recorded run, None for interrupted ranks."""
    found: dict[int, int | None] = {}
    for path in folder.glob(RANK_FILE.format(rank="*")):
        last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        try:
            line = LINES.validate_json(open_line(last))
        except (Damaged, ValidationError):
            line = None
        found[int(path.stem.removeprefix("rank"))] = line.num_steps if isinstance(line, ScriptEnd) else None
    return found


class _Processes:
    """Handles of the processes of a command, to end those that outlive it.

    Unlike the id of a process, a handle never means another process.
    """

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._handles: list[int] = []

    def hold(self) -> None:
        """Get a handle of each process that exists now."""
        for pid in self._tree.list_processes():
            with suppress(OSError):  # it has ended
                self._handles.append(os.pidfd_open(pid))

    def end(self) -> None:
        """End the processes: by SIGTERM, and by SIGKILL those that do not end."""
        self._send(signal.SIGTERM)
        end, left = time.monotonic() + _END_GRACE, set(self._handles)
        while left and (seconds := end - time.monotonic()) > 0.0:
            left -= set(
                select.select(left, [], [], seconds)[0]
            )  # a handle is readable when its process has ended
        self._send(signal.SIGKILL)
        for handle in self._handles:
            os.close(handle)

    def _send(self, number: int) -> None:
        for handle in self._handles:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, number)


def _wait(
    process: subprocess.Popen[bytes], processes: _Processes, hangs: HangReporter, look: Callable[[], bool]
) -> int:
    while True:
        try:
            return process.wait(_PERIOD)
        except subprocess.TimeoutExpired:
            if any([hangs.look(), look()]):
                break
    processes.hold()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_END_GRACE)
    process.kill()
    return process.wait()
