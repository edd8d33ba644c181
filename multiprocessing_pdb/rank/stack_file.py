"""Stacks of an armed process for `stacks` where py-spy may not look: faulthandler, on a signal, into a file.

faulthandler writes from C, so it also answers for a process that hangs in C with the interpreter's lock held. What it
writes as the process dies of a signal such as SIGSEGV is kept there too, for the console that asks how a rank died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from typing import Any

from multiprocessing_pdb.wire.runtime_directory import STACKS_SUFFIX, RuntimeDirectory


def _choose_signal() -> int | None:
    """Return a real-time signal that nobody handles."""
    if not hasattr(signal, "SIGRTMIN"):
        return None
    for number in range(int(signal.SIGRTMIN) + 9, int(signal.SIGRTMAX)):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    return None


class StackFile:
    """The file, and the signal that makes faulthandler write into it."""

    def __init__(self, directory: RuntimeDirectory, stem: str) -> None:
        self._directory = directory
        self._name = stem + STACKS_SUFFIX
        self._signal = _choose_signal()
        self._descriptor = -1
        self._has_enabled = False
        if self._signal is not None:
            directory.remove(self._name)
            self._descriptor = directory.create(self._name)
            faulthandler.register(self._signal, file=self._descriptor, all_threads=True, chain=False)
            if not faulthandler.is_enabled():  # else the program has chosen where its last words go
                faulthandler.enable(file=self._descriptor, all_threads=True)
                self._has_enabled = True

    def describe(self) -> dict[str, Any]:
        """Return what a console must know to ask."""
        return {} if self._signal is None else {"stack_signal": self._signal, "stack_file": self._name}

    def close(self) -> None:
        """Unregister, and remove the file."""
        if self._signal is not None and self._descriptor >= 0:
            if self._has_enabled:
                faulthandler.disable()
            # A late signal would end the process by its default action.
            with contextlib.suppress(ValueError, OSError):
                signal.signal(self._signal, signal.SIG_IGN)
            os.close(self._descriptor)
            self._descriptor = -1
            self._directory.remove(self._name)
