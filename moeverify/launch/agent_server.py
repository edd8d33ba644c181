"""A process that has imported what ranks need and forks the agents of many launches: they cost one import.

`python -m moeverify.launch.agent_server SOCKET PARENT` serves `moeverify.launch.forked_agents` on the socket that it
inherits. Agents are processes like any other, each the leader of a session of its own, and die with this one.
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

from moeverify.launch.agent import prepare, run_agent
from moeverify.launch.die_with_parent import die_with
from moeverify.launch.plan import Plan

_POLL = 0.01
_LONGEST = 1 << 16


def main() -> None:
    """Fork an agent for each request, until nobody can ask any more."""
    die_with(int(sys.argv[2]))
    plan = _serve(socket.socket(fileno=int(sys.argv[1])), os.getpid())
    if plan is not None:  # in an agent
        run_agent(plan)


def _serve(requests: socket.socket, server: int) -> Path | None:
    """Return the plan in a forked process, and None in this one once the controller has closed its end.

    An agent that has ended is buried when the controller has closed its end of the agent's socket: until then no
    other process can get its number.
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
    """Give this forked process what one that is started has: its session, its log, and an end with its parent."""
    os.close(control)
    os.setsid()
    die_with(server)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _bury(control: socket.socket, pid: int) -> None:
    """End an agent that nobody waits for any more, with its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    control.close()


def _tell(control: socket.socket, words: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # the controller has left this agent
        control.send(json.dumps(words).encode())


if __name__ == "__main__":
    main()
