"""Ranks of another node, reached through a relay that ssh, srun or a similar command starts there."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections import deque
from itertools import count
from typing import Any

from multiprocessing_pdb.console.deaths import Death
from multiprocessing_pdb.console.link import Channel, Link, LinkClosedError, wait
from multiprocessing_pdb.console.relay import GREETING
from multiprocessing_pdb.console.source import Warn
from multiprocessing_pdb.wire.framing import Decoder, Frame, FrameError, encode
from multiprocessing_pdb.wire.runtime_directory import VARIABLE

_START_SECONDS = 30.0
_ANSWER_SECONDS = 5.0
_PROCESSES_SECONDS = 60.0


class RemoteError(RuntimeError):
    """The other node cannot be reached."""


def list_srun_lines(job: str) -> list[str]:
    """Return, for each node of a Slurm job, the line that runs a command there. Raises RemoteError."""
    if not job.replace("_", "").replace("+", "").replace(".", "").isalnum():
        raise RemoteError(f"{job!r} is no Slurm job")
    try:
        nodes = _ask_slurm(["squeue", "--noheader", "--jobs", job, "--format", "%N"])
        hosts = [host for line in nodes for host in _ask_slurm(["scontrol", "show", "hostnames", line])]
    except (OSError, subprocess.SubprocessError) as error:
        raise RemoteError(f"Slurm does not say on which nodes job {job} runs: {error}") from None
    if not hosts:
        raise RemoteError(f"Slurm job {job} runs on no node")
    step = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --quiet --unbuffered"
    return [f"{step} --nodelist={shlex.quote(host)} sh -c" for host in dict.fromkeys(hosts)]


def _ask_slurm(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.split()


class RemoteLink:
    """A link to one rank behind a relay."""

    def __init__(self, source: RemoteSource, number: int) -> None:
        self.inbox: deque[Frame] = deque()
        self.closed = ""
        self._source = source
        self._number = number

    @property
    def channel(self) -> Channel:
        """The relay, shared by the links behind it."""
        return self._source

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises LinkClosedError."""
        if self.closed:
            raise LinkClosedError(self.closed)
        self._source.send({"op": "send", "link": self._number, "frame": frame})

    def explain_close(self) -> str:
        """Return why the link is closed, as the relay says."""
        return self.closed

    def kill(self) -> None:
        """Kill the process through the relay."""
        self._source.send({"op": "kill", "link": self._number})

    def close(self) -> None:
        """Close the link."""
        self.closed = self.closed or "closed here"


class RemoteSource:
    """The stopped ranks of another node. `line` runs a command there, such as "ssh node1"."""

    def __init__(self, line: str, python: str, warn: Warn) -> None:
        self._line = line
        self._warn = warn
        self._numbers = count(1)
        self._links: dict[int, RemoteLink] = {}
        self._answers: dict[int, Frame] = {}
        self._begun: dict[str, int] = {}  # numbers of requests sent ahead, by request
        self._decoder = Decoder()
        self._is_greeted = False
        self._noise = b""
        directory = os.environ.get(VARIABLE)
        setting = f"{VARIABLE}={shlex.quote(directory)} " if directory else ""
        command = f"{setting}exec {shlex.quote(python)} -m multiprocessing_pdb --relay"
        try:
            self._process = subprocess.Popen(
                [*shlex.split(line), command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the console must not end the relay
            )
        except OSError as error:
            raise RemoteError(f"{line}: {error}") from None

    def fileno(self) -> int:
        """Return the descriptor of the relay's output, or -1 once it is closed."""
        stdout = self._process.stdout
        return stdout.fileno() if stdout is not None and not stdout.closed else -1

    def pump(self) -> None:
        """Read frames from the relay and pass them to the links."""
        try:
            received = os.read(self.fileno(), 1 << 18) if self.fileno() >= 0 else b""
            if not received:
                self._fail("the relay has ended")
                return
            if not self._is_greeted:
                received = self._pass_noise(received)
            for frame in self._decoder.feed(received):
                self._take(frame)
        except (OSError, FrameError) as error:
            self._fail(str(error))

    def _pass_noise(self, received: bytes) -> bytes:
        self._noise = (self._noise + received)[-(1 << 18) - len(GREETING) :]
        _, greeting, after = self._noise.partition(GREETING)
        self._is_greeted = bool(greeting)
        return after if greeting else b""

    def _take(self, frame: Frame) -> None:
        number = frame.get("link")
        link = self._links.get(number) if isinstance(number, int) else None
        if isinstance(frame.get("id"), int):
            self._answers[frame["id"]] = frame
        elif link is not None and isinstance(frame.get("frame"), dict):
            link.inbox.append(frame["frame"])
        elif link is not None and "closed" in frame:
            link.closed = str(frame["closed"])

    def _fail(self, why: str) -> None:
        if self.fileno() >= 0:
            self._warn(f"{self._line}: {why}")
        for link in self._links.values():
            link.closed = link.closed or why
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def send(self, frame: Frame) -> None:
        """Send a frame to the relay. Raises LinkClosedError."""
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            raise LinkClosedError("the relay has ended")
        try:
            stdin.write(encode(frame))
            stdin.flush()
        except OSError as error:
            self._fail(str(error))
            raise LinkClosedError(str(error)) from None

    def begin(self, op: str, **fields: Any) -> None:
        """Send a request ahead of the method that needs its answer."""
        frame = {"op": op, **fields}
        with contextlib.suppress(LinkClosedError):  # reported by the method that needs the answer
            self._begun[repr(frame)] = self._send_request(frame)

    def _send_request(self, frame: Frame) -> int:
        number = next(self._numbers)
        self.send({**frame, "id": number})
        return number

    def _ask(self, frame: Frame, seconds: float) -> Frame:
        """Return the relay's own answer, or an empty frame if there is none."""
        try:
            number = self._begun.pop(repr(frame), None) or self._send_request(frame)
        except LinkClosedError:
            return {}
        deadline = time.monotonic() + (seconds if self._is_greeted else _START_SECONDS)
        while number not in self._answers and time.monotonic() < deadline and self.fileno() >= 0:
            wait([self], min(0.5, deadline - time.monotonic()))
        if number not in self._answers and self.fileno() >= 0:
            self._warn(f"{self._line}: no answer from the relay")
        return self._answers.pop(number, {})

    def refresh(self, *, armed: bool = False) -> dict[str, Link]:
        """Return a link to each stopped rank, or to each armed process, of that node."""
        answer = self._ask({"op": "refresh", "armed": armed}, _ANSWER_SECONDS)
        for warning in answer.get("warnings") or []:
            self._warn(f"{self._line}: {warning}")
        stems = answer.get("stems")
        found: dict[str, Link] = {}
        for stem, number in stems.items() if isinstance(stems, dict) else ():
            if isinstance(number, int):
                found[stem] = self._links.setdefault(number, RemoteLink(self, number))
        return found

    def _list_records(self, frame: Frame, seconds: float) -> list[dict[str, Any]]:
        records = self._ask(frame, seconds).get("processes")
        return [p for p in records if isinstance(p, dict)] if isinstance(records, list) else []

    def list_armed(self) -> list[dict[str, Any]]:
        """Return the records of that node's armed processes."""
        return self._list_records({"op": "armed"}, _ANSWER_SECONDS)

    def list_processes(self, job: str, action: str) -> list[dict[str, Any]]:
        """Return the processes of the job on that node."""
        return self._list_records({"op": "processes", "job": job, "action": action}, _PROCESSES_SECONDS)

    def take_deaths(self) -> list[Death]:
        """Return the ranks of that node that have died since the last call."""
        found = self._list_records({"op": "deaths"}, _ANSWER_SECONDS)
        return [death for death in found if {"pid", "start", "label", "how", "time"} <= death.keys()]

    def close(self) -> None:
        """End the relay. The ranks' state does not change."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
