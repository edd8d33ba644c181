"""Interruption of an expression evaluated for a console, without ever interrupting the program."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from multiprocessing_pdb.rank.unstopped import UNSTOPPED

_Result = TypeVar("_Result")

# Seconds for which an exception is offered to a thread other than the main one, and the pause before the
# next offer.
_OFFER_SECONDS = 0.02
_PAUSE_SECONDS = 0.05


class Interrupted(KeyboardInterrupt):
    """A console interrupted its own request."""


class Interruption:
    """Lets `send`, from any thread, interrupt `thread` between `allow` and `forbid`.

    The main thread needs a signal, which also ends a sleep or a wait inside C. In other threads Python can
    only raise at the next bytecode. While such an exception is pending, CPython 3.11 lets no traced thread
    of the process call a function: RESUME in DO_TRACING of Python/ceval.c repeats as long as any thread has
    an asynchronous exception. The interrupted thread may be waiting for such a traced thread. The exception
    is therefore offered only for short periods.
    """

    # One offer at a time per process, because the end of an offer clears a flag of the interpreter.
    _offers = threading.Lock()

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._allowed = False
        self._sent = False
        self._previous: Any = None
        self._offered = type("Interrupted", (Interrupted,), {"__init__": self._mark_delivered})

    def survive_fork(self) -> None:
        """Reset the state in a forked child. Other threads of the parent may have held the locks."""
        self._lock = threading.Lock()
        self._sent = False
        type(self)._offers = threading.Lock()

    def _is_main(self) -> bool:
        return self._thread is threading.main_thread()

    def _mark_delivered(self, *arguments: object) -> None:
        self._sent = False

    def allow(self) -> None:
        """Accept interruptions from now on. Called by the thread itself."""
        if self._allowed:
            return
        if self._is_main():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        self._allowed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._sent:
            self._sent = False
            raise Interrupted
        if callable(self._previous):  # Ctrl-C in the program's own terminal
            self._previous(number, frame)

    def forbid(self) -> None:
        """Stop accepting interruptions and discard a pending one. Called by the thread itself."""
        if not self._allowed:
            return
        while self._allowed:
            with contextlib.suppress(Interrupted):
                with self._lock:
                    self._allowed = False
                if self._is_main():
                    while self._sent:
                        time.sleep(0.001)
                else:
                    _pass_bytecodes()
        self._sent = False
        if self._is_main():
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._previous is None else self._previous)

    def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return the result of an interruptible call of `function`. No interruption is pending afterwards.

        Raises Interrupted, possibly after `function` has finished, but never after this call has returned.
        """
        depth = UNSTOPPED.depth
        try:
            try:
                self.allow()
                return function(*arguments)
            finally:
                self.forbid()  # may be interrupted before it begins
        except Interrupted:
            self.forbid()
            raise
        finally:
            UNSTOPPED.restore(depth)

    def send(self) -> bool:
        """Interrupt the thread, and return whether it accepts interruptions now."""
        with self._lock:
            if not self._allowed or self._thread.ident is None:
                return False
            if self._sent:
                return True
            self._sent = True
            if self._is_main():
                signal.pthread_kill(self._thread.ident, signal.SIGINT)
            else:
                threading.Thread(
                    target=self._offer, name="multiprocessing_pdb interrupt", daemon=True
                ).start()
            return True

    def _offer(self) -> None:
        """Offer the exception repeatedly until it is delivered or no longer accepted."""
        while True:
            with self._offers:
                with self._lock:
                    if not self._allowed or not self._sent:
                        return
                    _raise_in(self._thread.ident, self._offered)
                time.sleep(_OFFER_SECONDS)
                with self._lock:
                    _raise_in(self._thread.ident, None)
                _clear_flag()
            time.sleep(_PAUSE_SECONDS)


def _raise_in(ident: int | None, error: type[BaseException] | None) -> None:
    target = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), target)


def _pass_bytecodes() -> None:
    for _ in range(100):  # Python checks for asynchronous exceptions at the end of a loop body
        pass


def _clear_flag() -> None:
    """Clear the interpreter's flag of a pending exception, which a withdrawal does not clear.

    The flag is cleared in the thread that receives an exception, so this thread raises one in itself.
    """
    with contextlib.suppress(Interrupted):
        _raise_in(threading.get_ident(), Interrupted)
        _pass_bytecodes()
