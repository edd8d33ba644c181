"""Input and output streams of a debugger: console requests and answers, never the program's own streams."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_MOST_TEXT = 512 * 1024  # per command; the rest is cut, with a note
_MOST_PROMPT = 1024
_PART_TEXT = 8 * 1024
_PART_SECONDS = 0.1


class CommandOutput(io.TextIOBase):
    """A debugger's stdout. Output of other threads goes to the program's stdout."""

    encoding = "utf-8"  # pdbpp wraps streams with other encodings

    def __init__(self, owner: int, emit: Callable[[str], bool]) -> None:
        super().__init__()
        self.owner = owner
        self._emit = emit
        self._text = ""
        self._length = 0
        self._end = ""  # of the text that is cut: a prompt follows the output
        self._emitted_at = time.monotonic()
        self.program_stdout: TextIO | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Collect text for the console, and send long or slow output in parts."""
        if threading.get_ident() != self.owner:
            stdout = self.program_stdout
            return stdout.write(text) if stdout is not None else len(text)
        kept = text[: max(0, _MOST_TEXT - self._length)]
        self._text += kept
        self._length += len(text)
        if len(kept) < len(text):
            self._end = (self._end + text[len(kept) :])[-_MOST_PROMPT:]
        if len(self._text) > _PART_TEXT or time.monotonic() - self._emitted_at > _PART_SECONDS:
            self._hand_on()
        return len(text)

    def _hand_on(self) -> None:
        whole, newline, rest = self._text.rpartition("\n")
        if newline and self._emit(whole + newline):
            self._text = rest
            self._emitted_at = time.monotonic()

    def take(self) -> str:
        """Return the remaining output of this command, and start the next."""
        text, self._text, self._length = self._text, "", 0
        if self._end:
            prompt = self._end.rpartition("\n")[2]
            text, self._end = f"{text}\n... cut after {_MOST_TEXT} characters\n{prompt}", ""
        self._emitted_at = time.monotonic()
        return text


class CommandInput(io.TextIOBase):
    """A debugger's stdin. Each line is a request of a console."""

    encoding = "utf-8"

    def __init__(self, read: Callable[[], str]) -> None:
        super().__init__()
        self._read = read

    def readable(self) -> bool:
        """Return True."""
        return True

    def readline(self, limit: int | None = -1, /) -> str:  # type: ignore[override]
        """Return the next line, or an empty string when a console ends a nested prompt."""
        return self._read()


@contextmanager
def redirect_streams(stdin: CommandInput, stdout: CommandOutput) -> Iterator[None]:
    """Replace sys.stdin, sys.stdout and sys.stderr for commands that use them (clear, interact)."""
    kept = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stdout
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = kept
