"""Running a user's command so that its processes record what they train. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from moeverify.capture.lines import LINES, End
from moeverify.capture.settings import RANK_FILE
from moeverify.errors import CaseError, Problem

_STARTUP = Path(__file__).parents[1] / "startup"
_ROOT = Path(__file__).parents[2]
_PERIOD = 0.5  # seconds between two looks at what ranks have left


def run_command(
    command: Sequence[str], variables: Mapping[str, str], look: Callable[[], bool] | None = None
) -> int:
    """Run the command until it ends and return its exit code, 128 + n where signal n ended it.

    `variables` carry the settings to its processes. `look` is called now and then, and ends the command by returning
    True.

    Its output is its own. A signal that asks this process to end is passed on, and the command decides.

    Raises: CaseError where there is no such command.
    """
    environment = {**os.environ, **variables}
    # Ours first, so that `sitecustomize` is found there; the package itself last, behind everything of the script.
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
    # The terminal sends Ctrl-C to the command too.
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = _wait(process, look)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def count_steps(folder: Path) -> dict[int, int | None]:
    """Return how many optimizer steps each rank of a recorded run made, None for ranks that were cut off."""
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
