"""The context shared by all commands: consoles, and the mapping of errors to exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import typer

from moeverify.cli.github import publish_error
from moeverify.cli.refusals import describe_refusal, is_bad_input, lacks_memory
from moeverify.cli.reply import Reply, current_reply
from moeverify.errors import Problem

if TYPE_CHECKING:
    from rich.console import Console

EXIT_CODES = {"pass": 0, "mismatch": 1, "undecided": 4, "error": 3}
BAD_INPUT = 2
FAILED = 3
INTERRUPTED = 130
READER_GONE = 141  # the code that a shell reports for a process ended by SIGPIPE

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"

# The signals that end a command, with the handlers that Python starts with.
_DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}

_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))  # torchrun, srun


class Ended(KeyboardInterrupt):
    """A signal that ends the command; all of them get the same cleanup as Ctrl-C."""

    def __init__(self, number: int) -> None:
        is_typed = number == signal.SIGINT
        super().__init__("interrupted" if is_typed else f"ended by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True)
class CommandContext:
    """The consoles of a command, and its reply: results to `out`, errors to `err`; only the first rank prints."""

    out: Console
    err: Console
    is_first: bool
    reply: Reply

    def fail(self, text: str) -> None:
        """Print an error after which the command goes on, and add it to the reply."""
        self.err.print(f"error: {text}", soft_wrap=True)
        self.reply.problems.append(Problem(text))


@contextmanager
def open_context() -> Iterator[CommandContext]:
    """Yield the consoles of a command, and turn exceptions into a message and an exit code.

    The first rank writes the reply of the command, however that ends. Raises: typer.Exit.
    """
    from moeverify.report.console import open_console

    is_first = find_rank() == 0
    width = _find_width()
    context = CommandContext(
        open_console(sys.stdout, width=width, quiet=not is_first),
        open_console(sys.stderr, width=width, quiet=not is_first),
        is_first,
        current_reply(),
    )
    for stream in (sys.stdout, sys.stderr):
        _print_anything(stream)
    answer = context.reply if is_first else None
    code, error, is_over = 0, None, False
    try:
        with _ends_on_signals():
            if answer is not None:
                answer.check()
            yield context
            context.out.file.flush()
    except typer.Exit as end:
        code, is_over = end.exit_code, True
    except (Exception, KeyboardInterrupt) as raised:
        code, error, is_over = _tell_end(raised, context), raised, True
    if answer is not None:
        try:
            answer.write(code, error)
        except OSError as failure:
            code = code or _tell_end(failure, context)
    if code or is_over:
        raise typer.Exit(code) from None


def _tell_end(error: Exception | KeyboardInterrupt, context: CommandContext) -> int:
    """Print the exception that ends a command, and return the exit code."""
    from moeverify.errors import MoeverifyError, RankFailure
    from moeverify.report.problems import render_error

    if isinstance(error, MoeverifyError):
        render_error(error, context.err)
        publish_error(error, context.err)
        return FAILED if isinstance(error, RankFailure) else BAD_INPUT
    if isinstance(error, KeyboardInterrupt):  # also in a thread, or raised by code that a case names
        with suppress(OSError):  # the terminal is gone
            context.err.print(str(error) if isinstance(error, Ended) else "interrupted")
        return 128 + error.number if isinstance(error, Ended) else INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return READER_GONE
    # Python would exit with code 1, which here means a mismatch.
    if lacks_memory(error):
        text = "this machine has no memory left for it; try smaller sizes, or fewer ranks"
    else:
        text = describe_refusal(error) if isinstance(error, OSError) else ""
    _print_error(context, text or _report_fault(error))
    is_input = isinstance(error, OSError) and bool(text) and is_bad_input(error)
    return BAD_INPUT if is_input else FAILED


@contextmanager
def own_sections() -> Iterator[None]:
    """Disable pydantic's search for plugins while the sections of cases are built.

    The search opens a file of every installed distribution, a tenth of the time of `moeverify check`.
    """
    before = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PLUGINS]
        else:
            os.environ[_PLUGINS] = before


def _report_fault(error: BaseException) -> str:
    """Print the traceback of an exception, and return the text of the error message."""
    with suppress(OSError):
        traceback.print_exception(error)
    return "this is a fault of moeverify itself, or of the code that a case names"


def _print_error(context: CommandContext, text: str) -> None:
    from moeverify.report.sanitize import MOST_TEXT, elide

    with suppress(OSError):  # the log may be on the full disk
        context.err.print(f"error: {elide(text, MOST_TEXT)}", soft_wrap=True)


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Raise `Ended` on SIGINT, SIGTERM or SIGHUP: the default actions of the last two skip cleanup and reports.

    An error that follows a signal ends the command as the signal does: native code, such as pydantic's, turns
    the exception of a signal into one of its own. Ranks of an external launcher are left to that launcher. A
    signal that is ignored (`nohup`) stays ignored.
    """
    replaced = {number: kept for number, kept in _DEFAULTS.items() if signal.getsignal(number) is kept}
    if threading.current_thread() is not threading.main_thread() or _is_one_of_several():
        replaced = {}
    arrived: list[int] = []

    def end(number: int, frame: Any) -> None:
        arrived.append(number)
        for each in replaced.keys() - {signal.SIGINT}:
            signal.signal(each, lambda *_: None)  # a second signal must not stop the cleanup; Ctrl-C may
        raise Ended(number)

    for number in replaced:
        signal.signal(number, end)
    try:
        yield
    except typer.Exit:
        raise
    except Exception:
        if arrived:
            raise Ended(arrived[0]) from None
        raise
    finally:
        for number, kept in replaced.items():
            signal.signal(number, kept)


@contextmanager
def postponed_signals() -> Iterator[None]:
    """Finish the body before a signal ends the command: reports must be written and printed whole.

    The first signal of a kind takes effect afterwards. A second one takes effect at once, since the output
    may be blocked. Only the main thread receives signals. A signal that is ignored stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    kept: dict[int, Any] = {}

    def postpone(number: int, frame: Any) -> None:
        arrived.append(number)
        signal.signal(number, kept[number])

    for each in _DEFAULTS:
        if signal.getsignal(each) not in (signal.SIG_IGN, None):
            kept[each] = signal.getsignal(each)
            signal.signal(each, postpone)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def find_rank() -> int:
    """Return this process's rank if torchrun or srun started several, else 0."""
    return next((_read_integer(rank) for rank, size in _LAUNCHERS if _has_launched(rank, size)), 0)


def _is_one_of_several() -> bool:
    return any(_has_launched(rank, size) for rank, size in _LAUNCHERS)


def _has_launched(rank: str, size: str) -> bool:
    return _read_integer(size) > 1 and rank in os.environ


def is_continuous_integration() -> bool:
    """Return whether a CI server runs this process, according to the variable `CI`."""
    return os.environ.get("CI", "").strip().lower() in ("1", "true", "yes")


def _read_integer(name: str) -> int:
    """Return an environment variable as an integer, 0 if it is not one."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _find_width() -> int | None:
    """Return the width that the user set by COLUMNS, which applies to logs too."""
    return _read_integer("COLUMNS") or None


def _print_anything(stream: TextIO) -> None:
    """Make a stream with a narrow encoding escape unsupported characters instead of raising."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
