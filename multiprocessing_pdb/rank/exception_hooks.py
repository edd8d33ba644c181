"""Hooks for uncaught exceptions and breakpoint(). install() makes both stop the rank."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import Any

from multiprocessing_pdb.rank.trigger import load_stop

_VARIABLE = "PYTHONBREAKPOINT"
_HOOK = "multiprocessing_pdb.set_trace"
_PASSED = (SystemExit, KeyboardInterrupt, GeneratorExit)


def stop_after_exception(error: BaseException | None = None, why: str = "post_mortem()") -> None:
    """Stop where `error`, the current exception, or the last uncaught exception was raised.

    Raises ValueError when there is none.
    """
    error = error or sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or error.__traceback__ is None:
        raise ValueError("there is no exception to look at; pass one, or call this inside except")
    summary = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    module = load_stop()
    if module is not None:
        module.stop_after(error, module.Stop(f"{why}: {summary}" if why != summary else why))


def install() -> None:
    """Replace sys.excepthook, threading.excepthook and breakpoint(). A second call has no effect.

    Exceptions are printed as before, then the rank stops. multiprocessing and torch.multiprocessing.spawn
    catch and print the exceptions of their processes themselves, so the traceback functions that they call
    are also replaced.
    """
    if getattr(sys.excepthook, "__module__", "") == __name__:
        return
    _install_main(sys.excepthook)
    _install_threads(threading.excepthook)
    for name in ("print_exc", "format_exc"):
        _install_printing(name)
    if os.environ.get(_VARIABLE) in (None, ""):
        os.environ[_VARIABLE] = _HOOK  # inherited by spawned processes


def _install_main(previous: Any) -> None:
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        previous(kind, error, trace)
        if not issubclass(kind, _PASSED) and trace is not None:
            stop_after_exception(error.with_traceback(trace), "uncaught")

    sys.excepthook = excepthook


def _install_threads(previous: Any) -> None:
    def excepthook(arguments: threading.ExceptHookArgs, /) -> None:
        previous(arguments)
        error = arguments.exc_value
        if error is not None and not isinstance(error, _PASSED) and error.__traceback__ is not None:
            name = arguments.thread.name if arguments.thread is not None else "?"
            stop_after_exception(error, f"uncaught in thread {name}")

    threading.excepthook = excepthook


def _catches_for_process(frame: FrameType) -> bool:
    """Return whether `frame` is the one in which a child process catches all exceptions of its target."""
    place = frame.f_globals.get("__name__"), frame.f_code.co_name
    return place in (("multiprocessing.process", "_bootstrap"), ("torch.multiprocessing.spawn", "_wrap"))


def _install_printing(name: str) -> None:
    previous = getattr(traceback, name)

    def printing(*arguments: Any, **options: Any) -> Any:
        answer = previous(*arguments, **options)
        error = sys.exc_info()[1]
        if error is not None and _catches_for_process(sys._getframe(1)) and not isinstance(error, _PASSED):
            stop_after_exception(error, "uncaught")
        return answer

    setattr(traceback, name, printing)
