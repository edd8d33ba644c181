"""Stands where the agent of a launch would: a server that has imported torch forks the agent, and this waits for it.

`python client.py SERVER PLAN PARENT` takes signals for the agent, and ends as it ends. It dies with PARENT, and the
server then kills the agent and its ranks. Where the server will not serve, the agent is started anew, here.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Ask the server for an agent, and be it for whoever waits for this process."""
    name, plan, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # A signal that comes before there is an agent waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    request = {"plan": plan, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    try:
        server.connect("\0" + name)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        is_served = server.recv(16) == b"forked"
    except OSError:
        is_served = False
    for number in _FORWARDED if is_served else ():
        signal.signal(number, lambda number, frame: server.send(str(number).encode()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    if not is_served:
        os.execv(sys.executable, [sys.executable, "-m", "moeverify.launch.agent", plan, parent])
    status = int(server.recv(16) or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
