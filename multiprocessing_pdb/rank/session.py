"""One stopped thread: its prompt, the requests that wait for it, and what may be asked while it is busy."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from multiprocessing_pdb.rank.endpoint import Endpoint, announce
from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.interruption import Interruption
from multiprocessing_pdb.rank.mesh import find_coordinates
from multiprocessing_pdb.rank.process_state import PROCESS
from multiprocessing_pdb.rank.request_handler import RequestHandler
from multiprocessing_pdb.rank.streams import Answer, Input
from multiprocessing_pdb.wire.framing import Frame
from multiprocessing_pdb.wire.runtime_directory import SOCKET_SUFFIX


@dataclass
class Request:
    """A frame that the stopped thread itself must answer."""

    connection: int
    frame: Frame


class Session:
    """The state of one debugger between its first stop and the moment it runs free.

    `state` is "stopped" (at a prompt), "busy" (a command or expression runs) or "running" (the program runs,
    and a step or a breakpoint will stop it again).
    """

    def __init__(self) -> None:
        self.rank = identify()
        self.stdout = Answer(threading.get_ident(), self._emit_part)
        self.stdin = Input(self._read_line)
        self.nesting = 0
        self.runs_free = False
        self._why = ""
        self._coordinates: dict[str, int] | None = None
        self._state = "running"
        self._since = self._state_since = time.time()
        self._banner = self._prompt = ""
        self._is_fresh = True  # nothing printed since this stop began
        self._debugger: Any = None
        self._handler = RequestHandler()
        self._interruption = Interruption(threading.current_thread())
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._current: Request | None = None
        self._endpoint: Endpoint | None = None
        self._attached: set[int] = set()

    # What the stopped thread calls.

    def open(self, why: str, tcp: str | None, coordinates: dict[str, int] | None) -> None:
        """Open the endpoint, or keep the open one, for the stop that comes next.

        Raises OSError when the directory, the token file or the TCP address cannot be used.
        """
        self._why, self._coordinates = why, coordinates
        if self._endpoint is None:
            self.rank = identify()
            self._endpoint = Endpoint(
                self.rank.file_stem() + SOCKET_SUFFIX, self.receive, self.forget_connection, tcp
            )
            PROCESS.add(self)

    def enter(self, debugger: Any) -> None:
        """Begin to answer: the thread has stopped."""
        self._debugger = debugger
        self.runs_free = False
        self._is_fresh = True
        self._since = time.time()
        self.stdout.program_stdout = sys.stdout
        PROCESS.timeouts.hold(self)

    def leave(self) -> None:
        """Let the program run; the endpoint stays open when a step or a breakpoint will stop it again."""
        self._interruption.forbid()
        self._handler.forget()
        PROCESS.timeouts.release(self)
        self._set_state("running")
        if self.runs_free:
            self.close("resumed")

    def close(self, end: str) -> None:
        """Answer the command that let the program go, and close the endpoint."""
        if self._current is not None:
            self._reply(self._current, {"end": end, "out": self.stdout.take()})
            self._current = None
        while not self._requests.empty():  # meant for this stop; at the next one nobody expects them
            self._reply(self._requests.get(), {"error": "the rank went on before it came to this"})
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        PROCESS.remove(self)

    def abandon(self) -> None:
        """Forget the endpoint in a forked child; a stop there opens its own."""
        endpoint, self._endpoint = self._endpoint, None
        self._current = None
        if endpoint is not None:
            endpoint.abandon()

    def _set_state(self, state: str) -> None:
        self._state, self._state_since = state, time.time()

    def _read_line(self) -> str:
        """Finish the line before, then answer requests until one is a line for the debugger."""
        self._interruption.forbid()
        self._finish_line()
        while True:
            self._set_state("stopped")
            request = self._requests.get()
            self._set_state("busy")
            if self._handler.handles(request.frame["do"]):
                self._answer(request)
            elif request.frame.get("nested", False) == self._is_nested():
                self._current = request
                self._debugger.paint(request.frame.get("colors") is True)
                self._interruption.allow()
                return self._write_line(request.frame)
            else:
                self._reply(request, {"error": f"the rank is at the prompt {self._prompt!r}; attach to it"})

    def _write_line(self, frame: Frame) -> str:
        if frame["do"] == "eof":
            return ""
        # pdbpp takes `next` for a variable where there is one; "!!" says that the command is meant.
        force = "!!" if frame.get("command") is True and hasattr(self._debugger, "config") else ""
        return force + str(frame.get("text", "")).replace("\n", " ") + "\n"

    def _answer(self, request: Request) -> None:
        answer: Frame = {"error": "interrupted"}
        try:
            self._interruption.allow()
            answer = self._handler.answer(self._debugger, request.connection, request.frame)
        except KeyboardInterrupt:  # between the answer and here
            pass
        finally:
            self._interruption.forbid()
        self._reply(request, answer)

    def _finish_line(self) -> None:
        text, expected = self.stdout.take(), str(self._debugger.prompt)
        if text.endswith(expected):
            out, self._prompt = text[: -len(expected)], expected
        else:
            whole, newline, self._prompt = text.rpartition("\n")
            out = whole + newline
        if self._is_fresh:
            self._begin_stop(out)
        request, self._current = self._current, None
        if request is not None:
            self._set_state("stopped")
            self._reply(request, {"end": "ready", "out": out, **self.describe()})

    def _begin_stop(self, banner: str) -> None:
        self._is_fresh, self._banner = False, banner
        if self._coordinates is None:
            self._coordinates = find_coordinates(self._debugger.curframe)
        if self._current is None:
            place = self._find_place()
            where = f"{place['file']}:{place['line']}"
            announce(self.rank, where, self._why, self._endpoint.tcp_address if self._endpoint else "")

    def _is_nested(self) -> bool:
        """Tell whether the prompt is that of `interact`, `debug`, `commands` or a confirmation."""
        return self._prompt != str(self._debugger.prompt)

    def _emit_part(self, text: str) -> bool:
        """Send output ahead of the answer, and return whether anybody waits for one."""
        if self._current is not None:
            self._reply(self._current, {"part": text})
        return self._current is not None

    def _reply(self, request: Request, frame: Frame) -> None:
        if self._endpoint is not None:
            self._endpoint.server.send(request.connection, {"id": request.frame.get("id"), **frame})

    # What the server's thread calls.

    def receive(self, connection: int, frame: Frame) -> None:
        """Answer at once what needs no stopped thread, and leave the rest to it."""
        do = frame.get("do")
        request = Request(connection, frame)
        if do == "status":
            self._reply(request, self.describe())
        elif do == "attach":
            self._attached.add(connection)
            self._reply(request, {**self.describe(), "banner": self._banner})
        elif do == "detach":
            self._attached.discard(connection)
            self._reply(request, {})
        elif do == "interrupt":
            self._reply(request, {"interrupted": self._interrupt()})
        elif do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif do in ("line", "eof") or self._handler.handles(do):
            if self._state == "running":
                self._reply(request, {"error": "the rank runs; it is not at a prompt"})
            else:
                self._requests.put(request)
        else:
            self._reply(request, {"error": f"unknown request {str(do)[:40]!r}"})

    def forget_connection(self, connection: int) -> None:
        """Forget a console that has gone, however it went."""
        self._attached.discard(connection)
        self._handler.forget(connection)

    def _interrupt(self) -> str:
        """Interrupt what the thread does, and return what that was."""
        state = self._state
        if state == "busy":
            self._interruption.send()
        elif state == "running" and self._debugger is not None:
            self._debugger.set_step()  # the next traced event stops it; a call into C has to end first
        return state

    def _find_place(self) -> Frame:
        frame = getattr(self._debugger, "curframe", None)
        if frame is None:
            return {}
        index = getattr(self._debugger, "curindex", 0)
        stack = getattr(self._debugger, "stack", [])
        line = stack[index][1] if index < len(stack) else frame.f_lineno
        return {"file": frame.f_code.co_filename, "line": line, "function": frame.f_code.co_name}

    def describe(self) -> Frame:
        """Return what `ls` shows of this rank."""
        now = time.time()
        return {
            **vars(self.rank),
            **(self._find_place() if self._state != "running" else {}),
            "python": sys.executable,
            "coordinates": self._coordinates or {},
            "why": self._why,
            "stopped": now - self._since,
            "state": self._state,
            "lasting": now - self._state_since,
            "prompt": self._prompt,
            "nested": self._debugger is not None and self._is_nested(),
            "attached": len(self._attached),
            "limit": PROCESS.timeouts.shortest(),
        }
