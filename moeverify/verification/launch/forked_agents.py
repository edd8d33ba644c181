"""Client of the agent server, which forks the agents of many launches. Does not import torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from moeverify.verification.launch.clock import ActiveClock, ProcessTree
from moeverify.verification.launch.monitor import START_LIMIT, Agent

STOP = b"stop"
"""Request that ends a listening server as soon as it has no agent."""

_LONGEST = 1 << 10
_POLL = 0.5
_KILLED = -signal.SIGKILL


@contextmanager
def short_path(place: Path) -> Iterator[str]:
    """Yield a path of a socket that is short wherever its folder is: the kernel takes 107 bytes at most."""
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{place.name}"
    finally:
        os.close(folder)


class AgentServer(AbstractContextManager["AgentServer"]):
    """Context manager that starts agents for `run_jobs` without a new import for each. Thread-safe.

    The first launch decides which modules are imported, so all launches should use one entry and one device
    type. Leaving the context kills every running agent with its ranks. No agent can be started afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, plan: Path, log: BinaryIO) -> Agent:
        """Return the agent of a plan once it runs. Raises: OSError when it cannot be started."""
        with self._lock:
            if self._is_closed:
                raise OSError("no agent can be started any more")
            if self._process is not None and self._process.poll() is not None:
                self._close()  # the server has died: this launch gets a new one
                self._requests = None
            requests = self._requests or self._open()
        server = None if self._process is None else self._process.pid
        return request_agent(requests, plan, log, server)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the server, and with it every agent it forked."""
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
            "moeverify.verification.launch.agent_server",
            f"fd:{theirs.fileno()}",
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


def request_agent(
    requests: socket.socket, plan: Path, log: BinaryIO, server: int | None = None
) -> ForkedAgent:
    """Request the agent of a plan from a server. If its process id is known, waits for a processor do not count.

    Raises: OSError when the server does not answer.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, tempfile.TemporaryFile() as state:
        state.write(json.dumps(_describe_process()).encode())
        state.flush()
        socket.send_fds(requests, [str(plan).encode()], [theirs.fileno(), log.fileno(), state.fileno()])
    return ForkedAgent(ours, server)


def _describe_process() -> dict[str, Any]:
    """Return the state of this process that an agent takes over, see `agent.adopt`."""
    mask = os.umask(0o077)
    os.umask(mask)
    return {"environment": dict(os.environ), "folder": str(Path.cwd()), "umask": mask}


class ForkedAgent:
    """An agent forked by the server: no child of this process, but an `Agent` like `subprocess.Popen`."""

    def __init__(self, control: socket.socket, server: int | None) -> None:
        self._control = control
        self.returncode: int | None = None
        processes = ProcessTree()
        processes.root = server
        clock = ActiveClock(processes.measure)
        control.settimeout(_POLL)
        said = b""
        while clock.read() < START_LIMIT:
            with suppress(TimeoutError):
                said = control.recv(_LONGEST)
                break
        if not said:
            control.close()
            raise OSError("the process that starts ranks has ended, or does not answer")
        self.pid = int(json.loads(said)["pid"])

    def poll(self) -> int | None:
        """Return the exit status, or None while the agent runs.

        Minus the signal number if a signal ended it.
        """
        return self._receive(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Units: `timeout` in seconds. Raises: subprocess.TimeoutExpired when the agent still runs.
        """
        status = self._receive(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("moeverify.verification.launch.agent", timeout or 0.0)
        return status

    def terminate(self) -> None:
        """Send SIGTERM if the agent still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _receive(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._control.settimeout(timeout)
            try:
                said = self._control.recv(_LONGEST)
            except (TimeoutError, BlockingIOError):
                return None
            # The server has died, and the agent dies with it.
            self.returncode = int(json.loads(said)["status"]) if said else _KILLED
            self._control.close()
        return self.returncode
