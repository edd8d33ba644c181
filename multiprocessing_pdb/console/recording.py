"""`record FILE` and `replay FILE`: a session as a Markdown page for bug reports that is also a script."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

PROMPT = "mpdb> "
_FENCE = "~~~~"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_NOT_REPLAYED = ("attach", "detach", "record", "replay", "q", "quit", "exit")
_MOST_BYTES = 64 << 20


class RecordingError(ValueError):
    """A file that cannot be written or replayed."""


class Recording:
    """The page of one session, flushed to disk after each line."""

    def __init__(self, path: Path, job: str) -> None:
        """Create the file with access for its owner only, since values of a program may be secret."""
        self.path = path
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise RecordingError(f"{path} exists already; name a new file") from None
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from None
        self._file = os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")
        self._write(f"# multiprocessing_pdb: job {job}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n\n{_FENCE}\n")

    def add_command(self, line: str) -> None:
        """Add a typed command, in a form with the same effect at the console's prompt."""
        self._write(f"{PROMPT}{line}\n")

    def add_output(self, text: str, end: str = "\n") -> None:
        """Add output. Lines that look like a command get a leading space, so that they are not replayed."""
        text = _COLOR.sub("", text) + end
        self._write(re.sub(rf"^(?={re.escape(PROMPT)}|{_FENCE})", " ", text, flags=re.MULTILINE))

    def close(self) -> None:
        """End the page."""
        self._write(f"{_FENCE}\n")
        self._file.close()

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def read_commands(path: Path) -> list[str]:
    """Return the commands of a recorded session. Raises RecordingError when the file has none."""
    try:
        if not path.is_file():
            raise RecordingError(f"{path} is no file")
        if path.stat().st_size > _MOST_BYTES:
            raise RecordingError(f"{path} is larger than {_MOST_BYTES >> 20} MB: it is no recorded session")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from None
    commands = [line.removeprefix(PROMPT).strip() for line in lines if line.startswith(PROMPT)]
    found = [line for line in commands if line and line.split()[0] not in _NOT_REPLAYED]
    if not found:
        raise RecordingError(
            f"{path} has no line that begins with {PROMPT!r}; `record FILE` writes such a file"
        )
    return found
