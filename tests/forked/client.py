"""Replacement for a Python process that imports torch: a server with torch imported forks the process.

`python client.py SERVER WORDS...` is equivalent to `python WORDS...`. The client forwards signals, ends as
the process ends, and dies with its parent; then the server kills the process and its group. If the server
refuses, the client starts Python itself.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ask the server for a process, and act as that process for the caller."""
    _, name, *words = sys.argv
    parent = os.getppid()
    # A signal that arrives before the process exists is kept for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    request = {
        "words": words,
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "parent": parent,
        "leads": os.getsid(0) == os.getpid(),
    }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect("\0" + name)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        is_served = server.recv(16) == b"forked"
    except OSError:
        is_served = False
    if not is_served:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.execv(sys.executable, [sys.executable, *words])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: server.send(str(number).encode()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    status = int(server.recv(16) or 1)
    if status < 0:
        with contextlib.suppress(OSError):  # a signal that cannot be caught either
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
