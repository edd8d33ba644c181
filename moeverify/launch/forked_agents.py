"""Agents of many launches, forked by one process that has imported what they need. No torch in this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from moeverify.launch.monitor import START_LIMIT, Agent

_LONGEST = 1 << 10
_KILLED = -signal.SIGKILL


class AgentServer(AbstractContextManager["AgentServer"]):
    """Starts agents for `run_jobs` without an import for each; several threads may do so at once.

    The first launch decides what is imported, so that all of them should have one entry and one kind of device.
    Leaving the context ends every agent that still runs, with its ranks, and no other can be started.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, plan: Path, log: BinaryIO) -> Agent:
        """Return the agent of a plan, once it runs. Raises: OSError if there is none."""
        with self._lock:
            if self._is_closed:
                raise OSError("no agent can be started any more")
            if self._process is not None and self._process.poll() is not None:
                self._close()  # whatever has ended it, this launch need not suffer
                self._requests = None
            requests = self._requests or self._open()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(requests, [str(plan).encode()], [theirs.fileno(), log.fileno()])
        return ForkedAgent(ours)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process that forks, and with it whatever it has forked."""
        with self._lock:
            self._is_closed = True
            self._close()

    def _close(self) -> None:
        if self._process is not None and self._requests is not None:
            self._process.kill()
            self._process.wait()
            self._requests.close()

    def _open(self) -> socket.socket:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [
            sys.executable,
            "-m",
            "moeverify.launch.agent_server",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        with theirs:
            self._process = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._requests


class ForkedAgent:
    """A process that is not our child, but ends and is waited for like one."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self.returncode: int | None = None
        control.settimeout(START_LIMIT)
        try:
            said = control.recv(_LONGEST)
        except TimeoutError:
            said = b""
        if not said:
            control.close()
            raise OSError("the process that starts ranks has ended, or does not answer")
        self.pid = int(json.loads(said)["pid"])

    def poll(self) -> int | None:
        """Return its exit status, None while it runs; minus the number of the signal that has ended it."""
        return self._receive(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status. Units: `timeout` in seconds. Raises: subprocess.TimeoutExpired if it runs on."""
        status = self._receive(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("moeverify.launch.agent", timeout or 0.0)
        return status

    def terminate(self) -> None:
        """Ask it to end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _receive(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._control.settimeout(timeout)
            try:
                said = self._control.recv(_LONGEST)
            except (TimeoutError, BlockingIOError):
                return None
            # Without the process that has forked it, it is gone as well.
            self.returncode = int(json.loads(said)["status"]) if said else _KILLED
            self._control.close()
        return self.returncode
