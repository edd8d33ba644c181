"""Session of one stopped thread: its prompts, queued requests, and requests answered while busy."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from multiprocessing_pdb.rank.endpoint import Endpoint, announce, write_stderr
from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.interruption import Interrupted, Interruption
from multiprocessing_pdb.rank.mesh import find_coordinates
from multiprocessing_pdb.rank.process_state import PROCESS
from multiprocessing_pdb.rank.request_handler import RequestHandler
from multiprocessing_pdb.rank.server import Server
from multiprocessing_pdb.rank.stacks import format_stacks
from multiprocessing_pdb.rank.streams import CommandInput, CommandOutput
from multiprocessing_pdb.rank.unstopped import UNSTOPPED
from multiprocessing_pdb.wire.framing import Frame
from multiprocessing_pdb.wire.procfs import is_thread_alive
from multiprocessing_pdb.wire.runtime_directory import SOCKET_SUFFIX, runtime_path

_TOO_LATE: Frame = {"error": "the rank went on before it came to this"}


@dataclass(frozen=True)
class Stop:
    """The reason of a stop, the TCP address to listen on, and additional names for the prompt."""

    reason: str
    tcp: str | None = None
    coordinates: Mapping[str, int] | None = None
    names: Mapping[str, Any] | None = None


@dataclass
class Request:
    """A frame that the stopped thread itself must answer, and the server of the console's connection."""

    server: Server
    connection: int
    frame: Frame


class Session:
    """The state of one thread from its first stop until it runs without tracing.

    `state` is "stopped" (at a prompt), "busy" (a command or expression runs) or "running" (the program
    runs, and a step or breakpoint will stop it again). While an expression runs that stops itself,
    `debuggers` holds the prompts of both, the innermost last.
    """

    def __init__(self) -> None:
        self.rank = identify()
        self.stdout = CommandOutput(threading.get_ident(), self._emit_part)
        self.stdin = CommandInput(self._read_line)
        self.terminal_size = (80, 24)
        self.base: Any = None  # reused, so that a second stop keeps the first one's displays
        self.debuggers: list[Any] = []
        self.accepts_stops = True  # false inside the debugger's own code
        # frames below belong to the debugger, frames above to the evaluated code
        self.command_frame: FrameType | None = None
        self._coordinates: dict[str, int] | None = None
        self._state = "running"
        self._since = self._state_since = time.time()
        self._banner = self._prompt = ""
        self._is_fresh = True  # nothing has been printed since this stop began
        self._handler = RequestHandler()
        self._pid = os.getpid()
        self._thread_id = threading.get_native_id()
        self.interruption = Interruption(threading.current_thread())
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._current: Request | None = None
        self._endpoint: Endpoint | None = None
        self._attached: set[int] = set()
        self._given: list[tuple[Any, str]] = []  # names added for the prompt, with their namespace

    # Called by the stopped thread.

    def open(self, stop: Stop) -> bool:
        """Open the endpoint for the next stop, unless it is open; return whether it is open.

        If it cannot be opened safely, the program continues: a debugger must not end a run.
        """
        if not self.debuggers:
            self._coordinates = dict(stop.coordinates) if stop.coordinates is not None else None
        with UNSTOPPED:
            return self._reopen(stop)

    def _reopen(self, stop: Stop) -> bool:
        PROCESS.notice_fork()
        if self._pid != os.getpid():  # without an endpoint, and so unknown to PROCESS
            self._begin_in_child()
        if self._endpoint is not None and self._endpoint.serves():
            return True
        self._drop_endpoint()
        self.rank = identify()
        try:
            name = self.rank.file_stem() + SOCKET_SUFFIX
            endpoint = Endpoint(name, self.receive, self.forget_connection, stop.tcp, self._end_with_thread)
            self._endpoint = endpoint  # set before the start, since the answers use it
            endpoint.start()
        # RuntimeError: no threads at interpreter shutdown
        except (OSError, ValueError, RuntimeError) as error:
            self._endpoint = None
            write_stderr(f"rank {self.rank.label} does not stop: {error} (its socket is in {runtime_path()})")
            return False
        PROCESS.add(self)
        return True

    def enter(self, debugger: Any) -> bool:
        """Start answering: the thread is at a prompt. Return False if no console could reach it."""
        if not self._reopen(debugger.stop):
            return False
        self.debuggers.append(debugger)
        debugger.runs_free = False
        self._is_fresh = True
        self._since = time.time()
        self.stdout.program_stdout = sys.stdout
        self._give_names(debugger.stop.names or {}, debugger.frame_locals())
        PROCESS.timeouts.hold(self)
        return True

    def leave(self, debugger: Any) -> None:
        """Resume the program. Keep the endpoint open if a step or breakpoint will stop the thread again."""
        self.interruption.forbid()
        self.debuggers.remove(debugger)
        debugger.release()
        self._handler.forget()
        while self._given:
            names, name = self._given.pop()
            names.pop(name, None)
        if self.debuggers:
            self._set_state("busy")  # the outer prompt's command continues
            self.interruption.allow()
            return
        PROCESS.timeouts.release(self)
        self._set_state("running")
        if debugger.runs_free:
            self.close("resumed")

    def _give_names(self, given: Mapping[str, Any], names: Any) -> None:
        for name, value in given.items():
            free = f"_{name}" if name in names else name  # keep the program's own variables
            names[free] = value
            self._given.append((names, free))

    def close(self, end: str) -> None:
        """Answer the command that resumed the program, and close the endpoint."""
        with UNSTOPPED:
            self._close(end)

    def _close(self, end: str) -> None:
        if self._endpoint is not None:
            self._endpoint.hide()
        if self._current is not None:
            self._reply(self._current, {"end": end, "out": self.stdout.take()})
            self._current = None
        while not self._requests.empty():  # these requests were meant for this stop, not for the next one
            self._reply(self._requests.get(), _TOO_LATE)
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        PROCESS.remove(self)

    def end(self) -> None:
        """Close, and drop all references of the debuggers: the thread ends or has ended."""
        self.close("ended")
        if self.base is not None:
            vars(self.base).clear()  # part of reference cycles that live until a garbage collection
        self.base = None
        self.debuggers.clear()

    def abandon(self) -> None:
        """Forget the endpoint in a forked child. A stop there opens a new one."""
        self._drop_endpoint()
        self._begin_in_child()

    def _drop_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.abandon()
            PROCESS.remove(self)

    def _begin_in_child(self) -> None:
        """Reset the state in a child forked by this thread: no console, new process and thread ids."""
        self._pid, self._thread_id = os.getpid(), threading.get_native_id()
        self._current = None
        self._requests = queue.SimpleQueue()
        self._attached = set()
        self._handler = RequestHandler()
        self.interruption.survive_fork()

    def _set_state(self, state: str) -> None:
        self._state, self._state_since = state, time.time()

    def _read_line(self) -> str:
        """Finish the previous line, then answer requests until one is a line for the prompt."""
        if self._endpoint is None and not self._open_in_child():
            return "" if self._is_question() else "continue\n"
        self.interruption.forbid()
        accepts, self.accepts_stops = self.accepts_stops, False
        try:
            self._finish_line()
            while True:
                self._set_state("stopped")
                request = self._requests.get()
                if self._is_of_an_earlier_stop(request):
                    self._reply(request, _TOO_LATE)
                    continue
                self._set_state("busy")
                if self._handler.handles(request.frame["do"]):
                    self._answer(request)
                elif request.frame["do"] == "cancel":
                    raise Interrupted
                elif request.frame.get("nested", self._is_question()) == self._is_question():
                    return self._accept_line(request)
                else:
                    self._reply(request, {"error": self._refuse_line()})
        finally:
            self.accepts_stops = accepts

    def _open_in_child(self) -> bool:
        """Open an endpoint for a child that a command has forked and that returns to the prompt."""
        with UNSTOPPED:
            if not self._reopen(self.debuggers[-1].stop):
                return False
        PROCESS.timeouts.hold(self)
        return True

    def _is_of_an_earlier_stop(self, request: Request) -> bool:
        """Return whether a request arrived while an earlier endpoint was closing: not for this stop."""
        return self._endpoint is None or request.server is not self._endpoint.server

    def _refuse_line(self) -> str:
        if not self._is_question():
            return "the question was answered meanwhile; the rank is at its prompt"
        who = f"@{self.rank.label}"
        return (
            f"the rank asks {self._prompt.strip()!r}; answer with {who} TEXT, end the input with {who} EOF, "
            "or cancel it with interrupt"
        )

    def _accept_line(self, request: Request) -> str:
        """Return the line of a request as input for pdb."""
        frame = request.frame
        self._current = request
        self.debuggers[-1].paint(frame.get("colors") is True)
        if self._is_question():
            self.interruption.allow()  # the command that asked continues
        text = str(frame.get("text", "")).replace("\n", " ")
        if frame["do"] == "eof" or (self._is_question() and text.strip() == "EOF"):
            return ""
        # pdbpp treats `next` as an expression if a variable has this name. "!!" forces the command.
        force = "!!" if frame.get("command") is True and hasattr(self.debuggers[-1], "config") else ""
        return force + text + "\n"

    def _answer(self, request: Request) -> None:
        handler = self._handler
        try:
            answer = self.interruption.call(
                handler.answer, self.debuggers[-1], request.connection, request.frame
            )
        except Interrupted:
            answer = {"error": "interrupted"}
        self._reply(request, answer)

    def _finish_line(self) -> None:
        text, expected = self.stdout.take(), str(self.debuggers[-1].prompt)
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
            self._coordinates = find_coordinates(self.debuggers[-1].curframe)
        if self._current is None:
            place = self._find_place()
            where = f"{place['file']}:{place['line']}"
            tcp = self._endpoint.tcp_address if self._endpoint else ""
            announce(self.rank, where, self._find_stop().reason, tcp)

    def _is_question(self) -> bool:
        """Return whether the prompt belongs to `interact`, `commands` or a confirmation."""
        return bool(self.debuggers) and self._prompt != str(self.debuggers[-1].prompt)

    def _emit_part(self, text: str) -> bool:
        """Send partial output before the answer, and return whether a console waits for the answer."""
        if self._current is not None:
            self._reply(self._current, {"part": text})
        return self._current is not None

    def _reply(self, request: Request, frame: Frame) -> None:
        with UNSTOPPED:  # commands run traced
            request.server.send(request.connection, {"id": request.frame.get("id"), **frame})

    # Called by the server's thread.

    def receive(self, server: Server, connection: int, frame: Frame) -> None:
        """Answer requests that do not need the stopped thread, and queue the others for it."""
        do = frame.get("do")
        request = Request(server, connection, frame)
        if not isinstance(frame.get("id"), int | None):
            self._reply(request, {"error": "the id of a request is no number"})
        elif do == "status":
            self._reply(request, self.describe())
        elif do == "attach":
            self._attached.add(connection)
            self._reply(request, {**self.describe(), "banner": self._banner})
        elif do == "detach":
            self._attached.discard(connection)
            self._reply(request, {})
        elif do == "cancel":
            self._handler.cancel(connection, frame.get("request"))
        elif do == "interrupt":
            self._reply(request, {"interrupted": self._interrupt(request)})
        elif do == "stacks":
            self._reply(request, {"text": format_stacks()})
        elif do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif do in ("line", "eof") or self._handler.handles(do):
            if self._state == "running":
                self._reply(request, {"error": "the rank runs; it is not at a prompt"})
            else:
                self._take_size(frame.get("size"))
                self._requests.put(request)
        else:
            self._reply(request, {"error": f"unknown request {str(do)[:40]!r}"})

    def _take_size(self, size: object) -> None:
        if (
            isinstance(size, list)
            and len(size) == 2
            and all(isinstance(n, int) and 0 < n < 9999 for n in size)
        ):
            self.terminal_size = (size[0], size[1])

    def _end_with_thread(self) -> None:
        """End the session if its thread has ended unnoticed, as after a stop in its last destructor."""
        if self._endpoint is not None and not is_thread_alive(self._thread_id):
            self.end()

    def forget_connection(self, connection: int) -> None:
        """Forget a console that has disconnected."""
        self._attached.discard(connection)
        self._handler.forget(connection)

    def _interrupt(self, request: Request) -> str:
        """Interrupt the thread, and return the state that it was in."""
        state = self._state
        if state == "busy":
            self.interruption.send()
        elif state == "stopped" and self._is_question():
            self._requests.put(Request(request.server, request.connection, {"do": "cancel"}))
            return "busy"
        elif state == "running" and self._endpoint is not None:
            self.base.set_step()  # the next traced event stops it; a running call into C must return first
        return state

    def _find_stop(self) -> Stop:
        debugger = self.debuggers[-1] if self.debuggers else self.base
        return debugger.stop if debugger is not None else Stop("")

    def _find_place(self) -> Frame:
        debugger = self.debuggers[-1] if self.debuggers else None
        frame = getattr(debugger, "curframe", None)
        if frame is None:
            return {}
        index = getattr(debugger, "curindex", 0)
        stack = getattr(debugger, "stack", [])
        line = stack[index][1] if index < len(stack) else frame.f_lineno
        return {"file": frame.f_code.co_filename, "line": line, "function": frame.f_code.co_name}

    def describe(self) -> Frame:
        """Return the fields of this rank for `ls`."""
        now = time.time()
        return {
            **vars(self.rank),
            **(self._find_place() if self._state != "running" else {}),
            "python": sys.executable,
            "coordinates": self._coordinates or {},
            "reason": self._find_stop().reason,
            "stopped": now - self._since,
            "state": self._state,
            "lasting": now - self._state_since,
            "prompt": self._prompt,
            "nested": self._is_question(),
            "depth": len(self.debuggers),
            "attached": len(self._attached),
            "limit": PROCESS.timeouts.shortest(),
        }
