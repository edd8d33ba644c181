"""The user at the other end of a unix socket, reported by the kernel and so not forgeable."""

from __future__ import annotations

import os
import socket
import struct

_UCRED = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


class UnauthenticatedPeerError(PermissionError):
    """The peer belongs to another user, or its user is unknown."""


def check_peer(connection: socket.socket) -> int:
    """Return the peer's pid if it belongs to this user.

    Raises: UnauthenticatedPeerError if the user is another one or unknown.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        raise UnauthenticatedPeerError("this system cannot name the user at the other end of a unix socket")
    raw = connection.getsockopt(socket.SOL_SOCKET, option, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    if uid != os.geteuid():
        raise UnauthenticatedPeerError(f"the peer (pid {pid}) is user {uid}, not user {os.geteuid()}")
    return int(pid)
