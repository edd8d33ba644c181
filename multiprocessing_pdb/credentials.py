"""Who is at the other end of a unix socket: the kernel says, the peer cannot lie."""

from __future__ import annotations

import os
import socket
import struct

_UCRED = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


class StrangerError(PermissionError):
    """The peer is not this user."""


def check_peer(connection: socket.socket) -> int:
    """Return the peer's pid when its user is ours. Raises StrangerError when it is not or is unknown."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        raise StrangerError("this system cannot name the user at the other end of a unix socket")
    raw = connection.getsockopt(socket.SOL_SOCKET, option, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    if uid != os.geteuid():
        raise StrangerError(f"the peer (pid {pid}) is user {uid}, not user {os.geteuid()}")
    return int(pid)


def lift(connection: socket.socket) -> socket.socket:
    """Return the socket on a descriptor above 2, closed on exec.

    A program whose stdin was closed would otherwise get our socket as its descriptor 0.
    """
    if connection.fileno() > 2:
        return connection
    import fcntl

    number = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    lifted = socket.socket(connection.family, connection.type, connection.proto, fileno=number)
    connection.close()
    return lifted
