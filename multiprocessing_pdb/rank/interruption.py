"""Interrupting an expression that a console asked for, without ever interrupting the program."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A console asked to stop what it had asked for."""


class Interruption:
    """Lets `send`, from any thread, interrupt `thread` between `allow` and `forbid`.

    A signal is needed in the main thread: it also ends a sleep or a wait inside C. Elsewhere Python can only
    raise at the next bytecode.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._allowed = False
        self._sent = False
        self._previous: Any = None

    def _is_main(self) -> bool:
        return self._thread is threading.main_thread()

    def allow(self) -> None:
        """Begin to accept interruptions; called by the thread itself."""
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
        """Stop accepting, and swallow an interruption that is on its way; called by the thread itself."""
        if not self._allowed:
            return
        with self._lock:
            self._allowed = False
        try:
            if self._is_main():
                while self._sent:
                    time.sleep(0.001)
            elif self._sent:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), None)
        except Interrupted:
            pass
        self._sent = False
        if self._is_main():
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._previous is None else self._previous)

    def send(self) -> bool:
        """Interrupt the thread, and return whether it accepts that now."""
        with self._lock:
            if not self._allowed or self._thread.ident is None:
                return False
            self._sent = True
            if self._is_main():
                signal.pthread_kill(self._thread.ident, signal.SIGINT)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
                )
            return True
