"""Execution of a user's command whose processes record their training. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from moeverify.errors import CaseError, Problem
from moeverify.scripts.record.lines import LINES, End
from moeverify.scripts.record.settings import RANK_FILE

_STARTUP = Path(__file__).parents[1] / "startup"
_ROOT = Path(__file__).parents[3]
_PERIOD = 0.5  # seconds between two calls of `look`


def run_command(
    command: Sequence[str], variables: Mapping[str, str], look: Callable[[], bool] | None = None
) -> int:
    """Run the command until it ends and return its exit code, or 128 + n if signal n ended it.

    `variables` are environment variables with the settings for its processes. `look` is called periodically
    and ends the command by returning True. The command's output is not redirected. SIGTERM and SIGHUP are
    forwarded to the command, which decides how to handle them.

    Raises: CaseError when the command cannot be started.
    """
    environment = {**os.environ, **variables}
    # Our startup folder comes first, so that Python finds its `sitecustomize`; the package comes after the
    # script's.
    paths = [str(_STARTUP), os.environ.get("PYTHONPATH", ""), str(_ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        process = subprocess.Popen(list(command), env=environment)
    except OSError as error:
        problem = Problem(
            f"cannot run `{command[0]}`: {error.strerror or error}", remedy="give a command after `--`"
        )
        raise CaseError([problem]) from error
    numbers = (signal.SIGTERM, signal.SIGHUP)
    kept = {
        number: signal.signal(number, lambda number, _: process.send_signal(number)) for number in numbers
    }
    # The terminal also sends Ctrl-C to the command.
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = _wait(process, look)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def count_steps(folder: Path) -> dict[int, int | None]:
    """Return the number of optimizer steps of each rank of a recorded run, None for interrupted ranks."""
    found: dict[int, int | None] = {}
    for path in folder.glob(RANK_FILE.format(rank="*")):
        last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        try:
            line = LINES.validate_json(last)
        except ValidationError:
            line = None
        found[int(path.stem.removeprefix("rank"))] = line.num_steps if isinstance(line, End) else None
    return found


def _wait(process: subprocess.Popen[bytes], look: Callable[[], bool] | None) -> int:
    if look is None:
        return process.wait()
    while True:
        try:
            return process.wait(_PERIOD)
        except subprocess.TimeoutExpired:
            if look():
                process.terminate()
                look = _never


def _never() -> bool:
    return False
