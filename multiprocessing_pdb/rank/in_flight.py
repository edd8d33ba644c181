"""Collectives in flight: the one this process waits in, its start, and its timeout."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_PATHS = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
_WRAPPERS = ("/torch/distributed/c10d_logger.py",)


class InFlightCollectives:
    """Sampler of thread stacks: a thread waits in a collective if that is its innermost Python call.

    A wait on a handle in the user's own line (`work.wait()`) has no torch frame and is not seen on gloo. On
    NCCL the flight recorder contains every collective.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int, int], float] = {}

    def look(self, limit: float | None, is_raised: bool) -> dict[str, Any] | None:
        """Return {"what", "deadline"} of the collective that times out first, if it began before the raise.

        `limit` is the timeout in seconds with which it began. `deadline` is in time.time() seconds.
        """
        if limit is None:
            return None
        recorded = _read_recorder(limit) if is_raised else []
        now = time.time()
        waiting = _find_waiting()
        # A collective first seen while timeouts are raised began with the raised timeout.
        self._seen = {key: self._seen.get(key, now) for key in waiting if key in self._seen or not is_raised}
        found = [(self._seen[key] + limit, waiting[key]) for key in self._seen] + recorded
        if not found:
            return None
        deadline, what = min(found)
        return {"what": what, "deadline": deadline}


def _find_waiting() -> dict[tuple[int, int, int], str]:
    """Return the collective of each waiting thread, with a key that stays the same during one call."""
    found = {}
    for thread, innermost in sys._current_frames().items():
        if thread == threading.get_ident():
            continue
        frame: FrameType | None = innermost
        call: FrameType | None = None
        while frame is not None and frame.f_code.co_filename.endswith(_PATHS + _WRAPPERS):
            if frame.f_code.co_filename.endswith(_PATHS):
                call = frame
            frame = frame.f_back
        if call is not None:
            found[(thread, id(call), call.f_lasti)] = call.f_code.co_name
    return found


def _read_recorder(limit: float) -> list[tuple[float, str]]:
    """Return deadline and name of each active NCCL collective that does not have a raised timeout."""
    module = sys.modules.get("torch._C._distributed_c10d")
    dump: Callable[..., Any] | None = getattr(module, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
        return [
            (entry["time_created_ns"] / 1e9 + entry["timeout_ms"] / 1e3, str(entry["profiling_name"]))
            for entry in entries
            if entry["timeout_ms"] / 1e3 <= limit
        ]
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError):
        return []  # the recorder is off, or has another format in this torch
