"""The console's terminal: line editing, history and completion. The only module that imports readline."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multiprocessing_pdb.console.printable import make_printable
from multiprocessing_pdb.console.recording import Recording
from multiprocessing_pdb.wire.runtime_directory import DirectoryRefusedError, RuntimeDirectory

Complete = Callable[[str, str, int, int], list[str]]
_HISTORY_LINES = 2000
_DELIMITERS = " \t\n`~!#$%^&*()-=+[{]}\\|;:'\",<>/?"


def find_size() -> tuple[int, int]:
    """Return the columns and lines of the terminal, which the ranks' pdb uses to cut its output."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())  # COLUMNS does not follow changes of the window
    except (OSError, ValueError):
        size = shutil.get_terminal_size((80, 24))
    return size.columns or 80, size.lines or 24


def warn(text: str) -> None:
    """Print a line on stderr."""
    print(f"multiprocessing_pdb: {make_printable(text)}", file=sys.stderr, flush=True)


class Terminal:
    """Reads lines and prints. If stdin is not a terminal it reads plain lines, so input can be piped."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that lack characters
        self.is_interactive = sys.stdin.isatty()
        self.has_colors = sys.stdout.isatty() and os.environ.get("NO_COLOR", "") == ""
        self.recording: Recording | None = None
        self._readline: Any = None
        self._words: list[str] = []
        self._complete: Complete = lambda text, line, begin, end: []
        self._history: Path | None = None
        if self.is_interactive:
            self._set_up_editing()

    def _set_up_editing(self) -> None:
        try:
            import readline
        except ImportError:
            return
        self._readline = readline
        readline.set_completer(self._find_word)
        readline.set_completer_delims(_DELIMITERS)
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        with (
            contextlib.suppress(OSError, DirectoryRefusedError),
            RuntimeDirectory.open(create=True) as directory,
        ):
            self._history = directory.path / "history"
            with contextlib.suppress(FileExistsError):
                os.close(directory.create("history"))
            readline.read_history_file(self._history)
            readline.set_history_length(_HISTORY_LINES)

    def _find_word(self, text: str, state: int) -> str | None:
        if state == 0:
            line = self._readline.get_line_buffer()
            try:
                self._words = self._complete(
                    text, line, self._readline.get_begidx(), self._readline.get_endidx()
                )
            except Exception:  # readline would print the traceback into the edited line
                self._words = []
        return self._words[state] if state < len(self._words) else None

    def read(self, prompt: str, complete: Complete) -> str:
        """Return a line. Raises EOFError at the end of input and KeyboardInterrupt for Ctrl-C."""
        self._complete = complete
        if self.is_interactive:
            line = input(make_printable(prompt, is_prompt=True))
            if self._readline is not None and self._history is not None and line.strip():
                with contextlib.suppress(OSError):
                    self._readline.write_history_file(self._history)
            return line
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def record(self, line: str) -> None:
        """Add a command to the recording of this session, if there is one."""
        if self.recording is not None:
            self.recording.add_command(line)

    def echo(self, line: str) -> None:
        """Print a command that was not typed, without recording it: its execution records it."""
        print(make_printable(line), flush=True)

    def show(self, text: str) -> None:
        """Print a text and a newline."""
        self.show_part(f"{text}\n")

    def show_part(self, text: str, *, is_prompt: bool = False) -> None:
        """Print a part of a text, without a newline. The output of an attached prompt may clear the screen."""
        text = make_printable(text, is_prompt=is_prompt)
        print(text, end="", flush=True)
        if self.recording is not None:
            self.recording.add_output(text, end="")
