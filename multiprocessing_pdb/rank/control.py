"""Endpoint of an armed process that runs, for requests such as stacks, stop, and break at a line."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from multiprocessing_pdb.rank.endpoint import Endpoint
from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.mesh import find_coordinates
from multiprocessing_pdb.rank.pdb_loader import is_own_module
from multiprocessing_pdb.rank.process_state import PROCESS
from multiprocessing_pdb.rank.server import Server
from multiprocessing_pdb.rank.session import Stop
from multiprocessing_pdb.rank.stacks import format_stacks
from multiprocessing_pdb.rank.stop import trace_from
from multiprocessing_pdb.wire.framing import Frame
from multiprocessing_pdb.wire.runtime_directory import CONTROL_SUFFIX

_LIBRARIES = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
)
_PENDING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_CALLBACKS: list[Any] = []  # keep references, since C calls these functions later


def call_in_main_thread(function: Callable[[FrameType], None]) -> bool:
    """Schedule a call of `function` with the current frame of the main thread, before its next bytecode.

    A running call into C must return first. No signal is sent, so the program's own system calls are not
    interrupted. Return False if the interpreter's queue of pending calls is full.
    """

    def run(_: int | None) -> int:
        frame = sys._getframe().f_back
        if frame is not None:
            function(frame)
        return 0

    callback = _PENDING(run)
    _CALLBACKS.append(callback)
    return bool(ctypes.pythonapi.Py_AddPendingCall(callback, None) == 0)


def find_user_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame outside libraries, or `frame` if there is none."""
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        library = (
            name.startswith(_LIBRARIES) or name.startswith("<") or is_own_module(at.f_globals.get("__name__"))
        )
        if not library:
            return at
        at = at.f_back
    return frame


class Control:
    """The endpoint of an armed process. Raises OSError when it cannot be opened safely."""

    def __init__(self) -> None:
        self.rank = identify(process=True)
        self._since = time.time()
        self._lock = threading.Lock()
        self._asked = ""  # pending request to the main thread, if any
        self._coordinates: dict[str, int] = {}
        name = self.rank.file_stem() + CONTROL_SUFFIX
        self._endpoint = Endpoint(name, self.receive, lambda connection: None)
        self._endpoint.start()

    def receive(self, server: Server, connection: int, frame: Frame) -> None:
        """Answer a request, in the server's thread."""
        do = frame.get("do")
        if do == "status":
            answer = self._describe()
        elif do == "stacks":
            answer = {"text": format_stacks()}
        elif do == "stop":
            answer = self._ask_main("stop", lambda at: self._stop(at, str(frame.get("reason") or "stop")))
        elif do == "break":
            answer = self._ask_main("break", lambda at: self._break(at, frame))
        elif do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            answer = {"error": "the rank runs; it is not at a prompt"}
        server.send(connection, {"id": frame.get("id"), **answer})

    def _ask_main(self, what: str, function: Callable[[FrameType], None]) -> Frame:
        """Schedule one request in the main thread.

        CPython 3.11 hangs in a traced call while others are pending.
        """
        with self._lock:
            if PROCESS.has_open():
                return {"error": "a thread of this rank is stopped or being stepped already"}
            if self._asked:
                is_same = self._asked == what == "stop"
                return {} if is_same else {"error": f"asked to {self._asked}; a call into C has to end first"}
            self._asked = what

        def run(frame: FrameType) -> None:
            try:
                function(frame)
            finally:
                self._asked = ""

        if not call_in_main_thread(run):
            self._asked = ""
            return {"error": "too many calls wait for the main thread; a call into C has to end first"}
        return {}

    def stop(self, reason: str) -> None:
        """Stop the main thread at the next line of the user's code."""
        self._ask_main("stop", lambda at: self._stop(at, reason))

    def _stop(self, frame: FrameType, reason: str) -> None:
        trace_from(find_user_frame(frame), Stop(reason))

    def _break(self, frame: FrameType, request: Frame) -> None:
        place, condition = str(request.get("place")), str(request.get("condition") or "")
        file, _, line = place.rpartition(":")
        reason = f"break {place}" + (f" if {condition}" if condition else "")
        if line.isdecimal():
            trace_from(find_user_frame(frame), Stop(reason), (file, int(line), condition or None))

    def _describe(self) -> Frame:
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main or 0)
        place: Frame = {}
        if frame is not None:
            user = find_user_frame(frame)
            place = {"file": user.f_code.co_filename, "line": user.f_lineno, "function": user.f_code.co_name}
        self._coordinates = self._coordinates or find_coordinates(frame)
        return {
            **vars(self.rank),
            **place,
            "python": sys.executable,
            "coordinates": self._coordinates,
            "state": "armed",
            "reason": f"asked to {self._asked}; a call into C has to end first" if self._asked else "armed",
            "lasting": time.time() - self._since,
            "limit": PROCESS.timeouts.shortest(),
        }

    def close(self) -> None:
        """Stop the server and remove its file."""
        self._endpoint.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._endpoint.abandon()
