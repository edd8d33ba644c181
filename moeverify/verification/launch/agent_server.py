"""Server process that forks the agents of many launches, so that they share one import.

`python -m moeverify.verification.launch.agent_server SOCKET DEVICE SECONDS` listens on a socket file and serves
all controllers of this user, see `warm`. Each agent leads its own session and is killed when the server ends or
its controller closes the agent's socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from moeverify.verification.jobs import WORKER
from moeverify.verification.launch.agent import adopt, prepare, run_agent
from moeverify.verification.launch.die_with_parent import die_with
from moeverify.verification.launch.forked_agents import STOP, short_path
from moeverify.verification.launch.plan import LaunchPlan

_POLL = 0.01
_LONGEST = 1 << 16


def main() -> None:
    """Serve on the socket that the arguments name, and run an agent in each forked process."""
    place, device, idle = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    prepare(WORKER, device)
    listener = _listen(place)
    process = os.fork()
    if process:
        os.write(1, f"{process}\n".encode())
        os._exit(0)
    plan = _Server(listener, place, idle).serve()
    if plan is not None:  # this process is a forked agent
        run_agent(plan)


def _listen(place: Path) -> socket.socket:
    """Return a listener on a socket file. Only this user can connect: the folder has mode 700."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place.unlink(missing_ok=True)  # of a server that was killed
    with short_path(place) as path:
        listener.bind(path)
    listener.listen()
    return listener


class _Server:
    """The loop of the server: one process for the agents of all controllers.

    The server ends after `idle` seconds without an agent or a request, and removes `place`.
    """

    def __init__(self, listener: socket.socket, place: Path, idle: float) -> None:
        self._listener = listener
        self._place = place
        self._idle = idle
        self._requests: set[socket.socket] = set()
        self._agents: dict[socket.socket, int] = {}
        self._running: set[socket.socket] = set()
        self._last_used = time.monotonic()

    def serve(self) -> Path | None:
        """Return the plan path in a forked agent, and None in the server when its work is over.

        The server reaps an agent only after the controller has closed its end of the agent's socket. Until
        then the kernel cannot reuse the process id.
        """
        while True:
            waited = [self._listener, *self._requests, *self._agents]
            for ready in select.select(waited, [], [], _POLL if self._running else 1.0)[0]:
                if ready is self._listener:
                    self._requests.add(ready.accept()[0])
                elif ready in self._agents:
                    _bury(ready, self._agents.pop(ready))
                    self._running.discard(ready)
                else:
                    plan_path = self._answer(ready)
                    if plan_path is not None:
                        return plan_path
                self._last_used = time.monotonic()
            self._report_ends()
            if self._is_over():
                self._place.unlink(missing_ok=True)
                return None

    def _answer(self, request: socket.socket) -> Path | None:
        """Read one request and fork its agent. Return the plan path in the forked agent."""
        data, streams, _, _ = socket.recv_fds(request, _LONGEST, 3)
        if len(streams) != 3:
            if data == STOP:
                self._idle = 0.0
            self._requests.discard(request)
            request.close()
            return None
        plan_path = Path(data.decode())
        server, (control_end, log, environment) = os.getpid(), streams
        pid = os.fork()
        if pid == 0:
            for each in (self._listener, *self._requests, *self._agents):
                each.close()
            _become_agent(server, control_end, log)
            adopt(LaunchPlan.read(plan_path), environment)
            return plan_path
        control = socket.socket(fileno=control_end)
        for stream in (log, environment):
            os.close(stream)
        self._agents[control] = pid
        self._running.add(control)
        _send(control, {"pid": pid})
        return None

    def _report_ends(self) -> None:
        for control in list(self._running):
            end = os.waitid(os.P_PID, self._agents[control], os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if end is not None:
                is_exit = end.si_code == os.CLD_EXITED
                _send(control, {"status": end.si_status if is_exit else -end.si_status})
                self._running.discard(control)

    def _is_over(self) -> bool:
        return not self._agents and time.monotonic() - self._last_used >= self._idle


def _become_agent(server: int, control: int, log: int) -> None:
    """Set up this forked process like a started agent: own session, own log, death signal from the server."""
    os.close(control)
    os.setsid()
    die_with(server)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _bury(control: socket.socket, pid: int) -> None:
    """Kill an agent and its ranks after the controller has closed its socket, and reap the agent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    control.close()


def _send(control: socket.socket, words: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # the controller has closed the agent's socket
        control.send(json.dumps(words).encode())


if __name__ == "__main__":
    main()
