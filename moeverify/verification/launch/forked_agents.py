"""Client of the agent server, which forks the agents of many launches. Does not import torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from moeverify.verification.launch.monitor import START_LIMIT

STOP = b"stop"
"""Request that ends a listening server as soon as it has no agent."""

_LONGEST = 1 << 10
_KILLED = -signal.SIGKILL


@contextmanager
def short_path(place: Path) -> Iterator[str]:
    """Yield a path of a socket that is short wherever its folder is: the kernel takes 107 bytes at most."""
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{place.name}"
    finally:
        os.close(folder)


def request_agent(requests: socket.socket, plan: Path, log: BinaryIO) -> ForkedAgent:
    """Request the agent of a plan from a server.

    Raises: OSError when the server does not answer.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, tempfile.TemporaryFile() as state:
        state.write(json.dumps(_describe_process()).encode())
        state.flush()
        socket.send_fds(requests, [str(plan).encode()], [theirs.fileno(), log.fileno(), state.fileno()])
    return ForkedAgent(ours)


def _describe_process() -> dict[str, Any]:
    """Return the state of this process that an agent takes over, see `agent.adopt`."""
    mask = os.umask(0o077)
    os.umask(mask)
    return {"environment": dict(os.environ), "folder": str(Path.cwd()), "umask": mask}


class ForkedAgent:
    """An agent forked by the server: no child of this process, but an `Agent` like `subprocess.Popen`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self.returncode: int | None = None
        control.settimeout(START_LIMIT)
        said = b""
        with suppress(TimeoutError):
            said = control.recv(_LONGEST)
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
