"""What every command shares: where it prints, and how errors become exit codes."""

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
from moeverify.cli.refusals import describe_refusal

if TYPE_CHECKING:
    from rich.console import Console

EXIT_CODES = {"pass": 0, "mismatch": 1, "error": 3}
BAD_INPUT = 2
FAILED = 3
INTERRUPTED = 130
READER_GONE = 141  # what a shell shows for a process that SIGPIPE has ended

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"

_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))  # torchrun, srun


class Ended(KeyboardInterrupt):
    """A signal other than that of Ctrl-C asks the command to end, and it cleans up in the same way."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True)
class CommandContext:
    """Where a command prints: results to `out`, errors to `err`. Only the first of several ranks prints."""

    out: Console
    err: Console
    is_first: bool


@contextmanager
def open_context() -> Iterator[CommandContext]:
    """Give a command its consoles and turn what it raises into a message and an exit code.

    Raises: typer.Exit.
    """
    from moeverify.errors import MoeverifyError, RankFailure
    from moeverify.report.console import open_console
    from moeverify.report.problems import render_error

    is_first = find_rank() == 0
    width = _find_width()
    context = CommandContext(
        open_console(sys.stdout, width=width, quiet=not is_first),
        open_console(sys.stderr, width=width, quiet=not is_first),
        is_first,
    )
    for stream in (sys.stdout, sys.stderr):
        _print_anything(stream)
    try:
        with _ends_on_signals():
            yield context
            context.out.file.flush()
    except typer.Exit:
        raise
    except MoeverifyError as error:
        render_error(error, context.err)
        publish_error(error, context.err)
        raise typer.Exit(FAILED if isinstance(error, RankFailure) else BAD_INPUT) from None
    except Ended as error:
        with suppress(OSError):  # the terminal is gone
            context.err.print(str(error))
        raise typer.Exit(128 + error.number) from None
    except KeyboardInterrupt:
        context.err.print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise typer.Exit(READER_GONE) from None
    except OSError as error:
        _print_error(context, describe_refusal(error) or _report_fault())
        raise typer.Exit(FAILED) from None
    except MemoryError:
        _print_error(context, "this machine has no memory left for it; try smaller sizes, or fewer ranks")
        raise typer.Exit(FAILED) from None
    except Exception:
        # Python would exit with 1, which here means that a layout computes something else.
        _print_error(context, _report_fault())
        raise typer.Exit(FAILED) from None


@contextmanager
def own_sections() -> Iterator[None]:
    """Have pydantic build the sections of cases without its search for plugins, as typer builds its parameters.

    The search opens a file of every distribution that is installed: a tenth of the time of `moeverify check`.
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


def _report_fault() -> str:
    """Print the traceback of the error that is being handled, and return what to make of it."""
    with suppress(OSError):
        traceback.print_exc()
    return "this is a fault of moeverify itself, or of the code that a case names"


def _print_error(context: CommandContext, text: str) -> None:
    with suppress(OSError):  # the disk that is full may be that of the log
        context.err.print(f"error: {text}", soft_wrap=True, markup=False, highlight=False)


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Raise `Ended` where SIGTERM or SIGHUP would end the process at once, without its files and with its folders.

    Ranks of another launcher are left to that launcher, and a signal that is ignored (`nohup`) to be ignored.
    """
    numbers = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL
    ]
    if threading.current_thread() is not threading.main_thread() or _is_one_of_several():
        numbers = []

    def end(number: int, frame: Any) -> None:
        for each in numbers:
            signal.signal(each, lambda *_: None)  # one is enough: do not end the cleaning up
        raise Ended(number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def find_rank() -> int:
    """Return this process's rank where torchrun or srun started several, else 0."""
    return next((_read_integer(rank) for rank, size in _LAUNCHERS if _has_launched(rank, size)), 0)


def _is_one_of_several() -> bool:
    return any(_has_launched(rank, size) for rank, size in _LAUNCHERS)


def _has_launched(rank: str, size: str) -> bool:
    return _read_integer(size) > 1 and rank in os.environ


def is_continuous_integration() -> bool:
    """Return whether a CI server runs this, by the variable that all of them set."""
    return os.environ.get("CI", "").strip().lower() in ("1", "true", "yes")


def _read_integer(name: str) -> int:
    """Return an environment variable as a number, 0 when it is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _find_width() -> int | None:
    """Return the width that the user asks for by COLUMNS, which holds for logs too."""
    return _read_integer("COLUMNS") or None


def _print_anything(stream: TextIO) -> None:
    """Let a stream of a narrow encoding print what it cannot write as an escape, instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
