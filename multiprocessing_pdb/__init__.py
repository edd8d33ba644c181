"""A debugger for many Python ranks: one console stops and queries any of them.

    from multiprocessing_pdb import MultiprocessingPdb
    Tra = MultiprocessingPdb().set_trace

Then, in any terminal of the same user, run `python -m multiprocessing_pdb`. Importing this package opens no
socket, starts no thread and imports neither readline nor torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from multiprocessing_pdb.rank.compiled_code import leave_compiled_code, may_stop
from multiprocessing_pdb.rank.trigger import MultiprocessingPdb, load_stop

if TYPE_CHECKING:
    # Only the names are needed; importing this package must be cheap.
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
    module = load_stop() if may_stop() else None
    if module is not None:
        frame = sys._getframe(1)
        note = ", compiled: its next call has all locals" if leave_compiled_code(frame) else ""
        module.stop_at(frame, module.Stop(f"{header or 'breakpoint()'}{note}"))


def post_mortem(error: BaseException | None = None) -> None:
    """Stop this rank at the point where an exception was raised.

    The exception is `error`, else the one being handled, else the last uncaught one.

    Raises: ValueError if there is no such exception.
    """
    from multiprocessing_pdb.rank.exception_hooks import stop_after_exception

    stop_after_exception(error)


def install() -> None:
    """Stop on uncaught exceptions, also in threads and child processes, and replace breakpoint()."""
    from multiprocessing_pdb.rank.exception_hooks import install as install_hooks

    install_hooks()


def stop(
    header: str = "stop()", *, frame: FrameType | None = None, frame_locals: Mapping[str, Any] | None = None
) -> None:
    """Stop this rank immediately, in `frame` or in the caller. No collective is issued.

        stop("layers.3.moe differs", frame_locals={"expected": expected, "actual": actual})

    The names of `frame_locals` are available at the prompt in addition to the frame's own. A name that the
    frame also defines gets a leading underscore. They are removed when the rank continues.
    """
    module = load_stop() if may_stop() else None
    if module is not None:
        module.stop_at(frame or sys._getframe(1), module.Stop(header, names=frame_locals), now=True)


def stop_all(reason: str = "stop_all()") -> int:
    """Ask every other armed rank of this job to stop at its next line; return how many here were asked.

    No collective is issued, so the others need not expect it. A rank that waits inside a collective stops
    when that collective ends.
    """
    from multiprocessing_pdb.rank.peers import ask_peers_to_stop

    return ask_peers_to_stop(reason)


def set_reference(reference: Reference | None) -> None:
    """Set the object that `diff --golden` compares with; None removes it. No collective is issued.

        set_reference(golden)  # golden.compare(value, check) returns rows

    For programs that know the expected values of their tensors, such as the ranks of `moeverify run
    --debug`. `multiprocessing_pdb.rank.reference` defines the interface.
    """
    from multiprocessing_pdb.rank.reference import register_reference

    register_reference(reference)


def on_nan(model: Any) -> NanHooks:
    """Arm this rank, and stop it where an output or gradient of a module of `model` first goes bad.

    Return the hooks; call `remove()` on them to uninstall. The prompt has the names bad_module, bad_inputs,
    bad_output, bad_gradient or bad_parameter.
    """
    from multiprocessing_pdb.rank.nan_hooks import watch_model

    return watch_model(model)


def arm(*, hold: bool = False, limit: timedelta | None = None) -> None:
    """Watch for stopped ranks from now on; while one is stopped, raise this process's collective timeouts.

    `hold` raises the timeouts at once and until `disarm()`. Only this saves a collective that is already in
    flight when another rank stops. `limit` is the raised timeout, 7 days by default. No collective is
    issued.
    """
    from multiprocessing_pdb.rank.monitor import arm as start

    start(hold=hold, limit=limit)


def disarm() -> None:
    """Stop watching, and restore the timeouts."""
    from multiprocessing_pdb.rank.monitor import disarm as stop

    stop()
