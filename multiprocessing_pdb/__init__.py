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
    # Only the names are needed, and importing this package is to cost nothing.
    from collections.abc import Mapping
    from datetime import timedelta
    from types import FrameType

    from multiprocessing_pdb.rank.nan_hooks import NanHooks
    from multiprocessing_pdb.rank.reference import Reference

__all__ = [
    "MultiprocessingPdb",
    "arm",
    "disarm",
    "install",
    "on_nan",
    "post_mortem",
    "set_reference",
    "set_trace",
    "stop",
    "stop_all",
]


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


def stop(
    header: str = "stop()", *, frame: FrameType | None = None, frame_locals: Mapping[str, Any] | None = None
) -> None:
    """Stop this rank where it is: in `frame`, or in the caller. No collective.

        stop("layers.3.moe differs", frame_locals={"expected": expected, "actual": actual})

    The prompt knows the names of `frame_locals` besides the frame's own; one that the frame has itself gets a
    leading underscore. They are gone when the rank goes on.
    """
    from multiprocessing_pdb.rank.session import Stop
    from multiprocessing_pdb.rank.stop import stop_at

    stop_at(frame or sys._getframe(1), Stop(header, names=frame_locals), now=True)


def stop_all(reason: str = "stop_all()") -> int:
    """Ask every other armed rank of this job to stop at its next line; return how many here were asked.

    No collective: the others need not expect it. A rank that waits inside a collective stops once that ends.
    """
    from multiprocessing_pdb.rank.peers import ask_peers_to_stop

    return ask_peers_to_stop(reason)


def set_reference(reference: Reference | None) -> None:
    """Compare with this at `diff --golden`; None ends that. No collective.

        set_reference(golden)  # golden.compare(value, check) returns rows, see multiprocessing_pdb.rank.reference

    For programs that know what their tensors should be; the ranks of `moeverify run --debug` do.
    """
    from multiprocessing_pdb.rank.reference import register_reference

    register_reference(reference)


def on_nan(model: Any) -> NanHooks:
    """Arm this rank, and stop it where an output or a gradient of a module of `model` first goes bad.

    Returns the hooks; `remove()` takes them away. The prompt knows bad_module, bad_inputs, bad_output,
    bad_gradient or bad_parameter.
    """
    from multiprocessing_pdb.rank.nan_hooks import watch_model

    return watch_model(model)


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
