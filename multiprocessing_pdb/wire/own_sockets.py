"""Sockets that stay the debugger's own. A module apart: unused, the package imports no socket."""

from __future__ import annotations

import socket

from multiprocessing_pdb.wire.own_descriptors import find_identity, move_above_standard_streams


class OwnSocket(socket.socket):
    """A socket above descriptor 2 that takes over the descriptor of another one and does not block."""

    __slots__ = ("_identity",)

    def __init__(self, taken: socket.socket) -> None:
        super().__init__(fileno=move_above_standard_streams(taken.detach()))
        self._identity = find_identity(self.fileno())
        self.setblocking(False)

    def is_open(self) -> bool:
        """Return whether nobody has closed or replaced the descriptor."""
        return self._identity is not None and find_identity(self.fileno()) == self._identity

    def close(self) -> None:
        """Close the socket, but not another file that has its number now."""
        if self.is_open():
            super().close()
        else:
            self.detach()
