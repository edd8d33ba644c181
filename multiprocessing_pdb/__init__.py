"""A debugger for many Python ranks: stop any of them, ask all of them, from one console.

    from multiprocessing_pdb import MultiprocessingPdb
    Tra = MultiprocessingPdb().set_trace

and, in any terminal of the same user, `python -m multiprocessing_pdb`. Importing this opens no socket, starts
no thread and imports neither readline nor torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from multiprocessing_pdb.rank.trigger import MultiprocessingPdb

if TYPE_CHECKING:
    from datetime import timedelta  # only its name is needed, and importing this package is to cost nothing

__all__ = ["MultiprocessingPdb", "arm", "disarm", "install", "post_mortem", "set_trace"]


def set_trace(*arguments: Any, header: str | None = None) -> None:
    """Stop this rank at the next line: for PYTHONBREAKPOINT=multiprocessing_pdb.set_trace."""
    from multiprocessing_pdb.rank.session import Stop
    from multiprocessing_pdb.rank.stop import stop_at

    stop_at(sys._getframe(1), Stop(header or "breakpoint()"))


def post_mortem(error: BaseException | None = None) -> None:
    """Stop this rank where `error`, the exception being handled, or the last uncaught one was raised.

    Raises ValueError when there is no such exception.
    """
    from multiprocessing_pdb.rank.exception_hooks import stop_after_exception

    stop_after_exception(error)


def install() -> None:
    """Stop on uncaught exceptions, also of threads and child processes, and take over breakpoint()."""
    from multiprocessing_pdb.rank.exception_hooks import install as install_hooks

    install_hooks()


def arm(*, hold: bool = False, limit: timedelta | None = None) -> None:
    """Monitor for stopped ranks from now on, and raise this process's collective timeouts meanwhile.

    `hold` raises them at once and until `disarm()`: the only way to save a collective that will be in flight
    when another rank stops. `limit` is what they are raised to, 7 days by default. No collective.
    """
    from multiprocessing_pdb.rank.monitor import arm as start

    start(hold=hold, limit=limit)


def disarm() -> None:
    """Stop watching, and restore the timeouts."""
    from multiprocessing_pdb.rank.monitor import disarm as stop

    stop()
