"""Stacks of an armed process for `stacks` without py-spy: faulthandler writes them to a file on a signal.

faulthandler runs in C, so it also works for a process that hangs in C while holding the interpreter lock.
Its dump on a fatal signal such as SIGSEGV goes to the same file, for a console that asks how a rank died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from typing import Any

from multiprocessing_pdb.wire.own_descriptors import OwnDescriptor
from multiprocessing_pdb.wire.runtime_directory import STACKS_SUFFIX, RuntimeDirectory


def _choose_signal() -> int | None:
    """Return a real-time signal without a handler, or None."""
    if not hasattr(signal, "SIGRTMIN"):
        return None
    for number in range(int(signal.SIGRTMIN) + 9, int(signal.SIGRTMAX)):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    return None


class StackFile:
    """The stack file, and the signal that makes faulthandler write to it."""

    def __init__(self, directory: RuntimeDirectory, stem: str) -> None:
        self._directory = directory
        self._name = stem + STACKS_SUFFIX
        self._signal = _choose_signal()
        self._opened: OwnDescriptor | None = None
        self._has_enabled = False
        self.restore()

    def restore(self) -> None:
        """Open the file, also again if the program has closed its descriptor, or opened another with it."""
        if self._signal is None or (self._opened is not None and self._opened.is_open()):
            return
        self._directory.remove(self._name)
        self._opened = OwnDescriptor(self._directory.create(self._name))
        faulthandler.register(self._signal, file=self._opened.number, all_threads=True, chain=False)
        # otherwise the program has configured faulthandler itself
        if self._has_enabled or not faulthandler.is_enabled():
            faulthandler.enable(file=self._opened.number, all_threads=True)
            self._has_enabled = True

    def describe(self) -> dict[str, Any]:
        """Return the fields that a console needs to request the stacks."""
        return {} if self._signal is None else {"stack_signal": self._signal, "stack_file": self._name}

    def close(self) -> None:
        """Unregister the signal and remove the file."""
        if self._signal is not None and self._opened is not None:
            if self._has_enabled:
                faulthandler.disable()
            # By default, a late signal would end the process.
            with contextlib.suppress(ValueError, OSError):
                signal.signal(self._signal, signal.SIG_IGN)
            self._opened.close()
            self._opened = None
            self._directory.remove(self._name)
