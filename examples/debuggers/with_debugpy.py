"""The three tasks with debugpy: one editor session per rank; a client sends the editor's requests."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from typing import Any

from desk import PATIENCE, SHORT, WORLD, Desk, FailedError, find_line, name_odd_one

Body = dict[str, Any]
PORT = 5700  # of rank 0


class Session:
    """One session of the Debug Adapter Protocol. A user's action in the editor counts as a typed line."""

    def __init__(self, desk: Desk, rank: int) -> None:
        desk.typed.append(f"attach to port {PORT + rank}")
        self._desk = desk
        self._connection = socket.create_connection(("127.0.0.1", PORT + rank), PATIENCE)
        self._received = b""
        self._number = 0
        self._answers: dict[int, Body] = {}
        self._events: list[Body] = []
        self._ask("initialize", adapterID="try", pathFormat="path", linesStartAt1=True)
        self._send("attach", justMyCode=False)
        self.await_event("initialized")
        self._ask("configurationDone")

    def _send(self, command: str, **arguments: Any) -> int:
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        payload = json.dumps(message).encode()
        self._connection.sendall(b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        return self._number

    def _receive(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._connection], [], [], left)[0]:
            raise FailedError("no answer")
        self._received += self._connection.recv(65536)
        while (head := re.match(rb"Content-Length: (\d+)\r\n\r\n", self._received)) and len(
            self._received
        ) >= head.end() + int(head[1]):
            end = head.end() + int(head[1])
            message = json.loads(self._received[head.end() : end])
            self._received = self._received[end:]
            if message["type"] == "event":
                self._events.append(message)
            elif message["type"] == "response":
                self._answers[message["request_seq"]] = message

    def _ask(self, command: str, seconds: float = PATIENCE, **arguments: Any) -> Body:
        number, deadline = self._send(command, **arguments), time.monotonic() + seconds
        while number not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(number)
        if not answer["success"]:
            raise FailedError(f"{command}: {answer.get('message')}")
        return answer.get("body") or {}

    def await_event(self, name: str, seconds: float = PATIENCE) -> Body:
        """Return the next event of a name. Raises FailedError."""
        deadline = time.monotonic() + seconds
        while True:
            for event in self._events:
                if event["event"] == name:
                    self._events.remove(event)
                    return event.get("body") or {}
            self._receive(deadline)

    def do(self, command: str, **arguments: Any) -> Body:
        """Send the request of a click or a typed expression."""
        self._desk.typed.append(command)
        return self._ask(command, **arguments)

    def find_thread(self) -> int:
        """Return the main thread."""
        return int(self._ask("threads")["threads"][0]["id"])

    def list_frames(self, thread: int) -> list[Body]:
        """Return the stack of a stopped thread, which editors show automatically."""
        return list(self._ask("stackTrace", SHORT, threadId=thread)["stackFrames"])

    def await_stop(self, seconds: float = PATIENCE) -> int:
        """Return the stopped thread. Raises FailedError."""
        return int(self.await_event("stopped", seconds)["threadId"])


def _find_training(frames: list[Body]) -> Body:
    """Return the frame of the training loop. Raises FailedError."""
    for frame in frames:
        if frame["name"].endswith("train"):
            return frame
    raise FailedError(f"the training loop is not on the stack: {[frame['name'] for frame in frames]}")


def _open_all(desk: Desk, task: str) -> list[Session]:
    desk.train(task, "debugpy")
    return [Session(desk, rank) for rank in range(WORLD)]


def find_bias(desk: Desk) -> str:
    """Use one session per rank, with one evaluation in each."""
    values = []
    for session in _open_all(desk, "bias"):
        frame = _find_training(session.list_frames(session.await_stop()))
        values.append(session.do("evaluate", expression="bias.tolist()", frameId=frame["id"])["result"])
    return f"{name_odd_one(values)}, from four sessions"


def find_hang(desk: Desk) -> str:
    """Fail: `pause` stops at the next bytecode, which a rank that waits in C does not reach."""
    silent, where = [], ""
    for rank, session in enumerate(_open_all(desk, "hang")):
        thread = session.find_thread()
        session.do("pause", threadId=thread)
        try:
            frames = session.list_frames(session.await_stop(SHORT))
        except FailedError:
            try:
                names = [frame["name"] for frame in session.list_frames(thread)]
            except FailedError:
                names = []
            silent.append(f"{rank} ({names[0]})" if names else f"{rank}")
            continue
        if rank == 1 and any("wait_for_data" in frame["name"] for frame in frames):
            where = "rank 1 in wait_for_data"
    if not where:
        raise FailedError(f"no stack of rank 1; silent: {silent}")
    return f"{where}; ranks {', '.join(silent)} did not pause in {SHORT:.0f} s each"


def step_exchange(desk: Desk) -> str:
    """Step two sessions and continue the other two."""
    sessions = _open_all(desk, "exchange")
    threads = [session.await_stop() for session in sessions]
    for session, thread in zip(sessions[2:], threads[2:], strict=True):
        session.do("continue", threadId=thread)
    lines = [
        [_find_training(s.list_frames(t))["line"] for s, t in zip(sessions[:2], threads[:2], strict=True)]
    ]
    while len(lines) < 4 and not all(line > find_line("= exchange(") for line in lines[-1]):
        for session, thread in zip(sessions[:2], threads[:2], strict=True):
            session.do("next", threadId=thread)
        stopped = [session.await_stop(SHORT) for session in sessions[:2]]
        frames = [s.list_frames(thread) for s, thread in zip(sessions[:2], stopped, strict=True)]
        lines.append([_find_training(each)["line"] for each in frames])
    if not all(line > find_line("= exchange(") for line in lines[-1]):
        raise FailedError(f"the ranks stand at lines {lines}")
    return f"both over it, from line {lines[0][0]} to {lines[-1][0]}, from two sessions"
