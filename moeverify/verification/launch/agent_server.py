"""Server process that forks the agents of many launches, so that they share one import.

`python -m moeverify.verification.launch.agent_server SOCKET PARENT` serves
`moeverify.verification.launch.forked_agents` on an inherited socket. Each agent leads its
own session and is killed when the server ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from moeverify.verification.launch.agent import prepare, run_agent
from moeverify.verification.launch.die_with_parent import die_with
from moeverify.verification.launch.plan import Plan

_POLL = 0.01
_LONGEST = 1 << 16


def main() -> None:
    """Fork an agent for each request until the controller closes the request socket."""
    die_with(int(sys.argv[2]))
    plan = _serve(socket.socket(fileno=int(sys.argv[1])), os.getpid())
    if plan is not None:  # True only in a forked agent.
        run_agent(plan)


def _serve(requests: socket.socket, server: int) -> Path | None:
    """Return the plan path in a forked agent, or None in the server after the controller closes its socket.

    The server reaps an agent only after the controller has closed its end of the agent's socket. Until then
    the kernel cannot reuse the process id.
    """
    agents: dict[socket.socket, int] = {}
    running: set[socket.socket] = set()
    is_prepared = False
    while True:
        for ready in select.select([requests, *agents], [], [], _POLL)[0]:
            if ready is not requests:
                _bury(ready, agents.pop(ready))
                running.discard(ready)
                continue
            data, streams, _, _ = socket.recv_fds(requests, _LONGEST, 2)
            if not data:
                return None
            plan_path = Path(data.decode())
            if not is_prepared:
                prepare(Plan.read(plan_path))
                is_prepared = True
            pid = os.fork()
            if pid == 0:
                for each in (requests, *agents):
                    each.close()
                _become_agent(server, *streams)
                return plan_path
            control = socket.socket(fileno=streams[0])
            os.close(streams[1])
            agents[control] = pid
            running.add(control)
            _tell(control, {"pid": pid})
        for control in list(running):
            end = os.waitid(os.P_PID, agents[control], os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if end is not None:
                is_exit = end.si_code == os.CLD_EXITED
                _tell(control, {"status": end.si_status if is_exit else -end.si_status})
                running.discard(control)


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


def _tell(control: socket.socket, words: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # the controller has closed the agent's socket
        control.send(json.dumps(words).encode())


if __name__ == "__main__":
    main()
