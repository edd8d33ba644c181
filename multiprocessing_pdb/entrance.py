"""The way into a stopped rank: its socket file, its TCP port if asked, its line on stderr."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Callable

from multiprocessing_pdb.challenge import read_token, token_path
from multiprocessing_pdb.descriptors import above_standard
from multiprocessing_pdb.directory import SOCKET_SUFFIX, VARIABLE, Directory
from multiprocessing_pdb.door import CommandContext
from multiprocessing_pdb.framing import Frame
from multiprocessing_pdb.rank import Rank


class Entrance:
    """An open door and the file that leads to it."""

    def __init__(self, door: CommandContext, directory: Directory, name: str, port: str) -> None:
        self.door = door
        self.port = port
        self._directory = directory
        self._name = name

    def close(self) -> None:
        """Remove the file first: nobody may find a door that is about to close."""
        self._directory.remove(self._name)
        self._directory.close()
        self.door.shut(patience=1.0)

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self.door.abandon()
        self._directory.close()


def _listen_tcp(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(16)
    except BaseException:
        listener.close()
        raise
    return listener


def open_entrance(
    rank: Rank, receive: Callable[[int, Frame], None], leave: Callable[[int], None], tcp: str | None
) -> Entrance:
    """Return an entrance that consoles of this user can find.

    Raises OSError when the directory, the token file or the TCP address cannot be used.
    """
    with above_standard():
        return _open(rank, receive, leave, tcp)


def _open(
    rank: Rank, receive: Callable[[int, Frame], None], leave: Callable[[int], None], tcp: str | None
) -> Entrance:
    directory = Directory.open(create=True)
    name = rank.file_stem() + SOCKET_SUFFIX
    listeners: list[socket.socket] = []
    try:
        token = read_token(token_path()) if tcp else None
        listeners.append(directory.listen(name))
        if tcp:
            listeners.append(_listen_tcp(tcp))
        door = CommandContext(listeners, receive, leave, token)
    except BaseException:
        for listener in listeners:
            listener.close()
        directory.remove(name)
        directory.close()
        raise
    door.start()
    port = ":".join(str(part) for part in listeners[1].getsockname()[:2]) if tcp else ""
    return Entrance(door, directory, name, port)


def tell(line: str) -> None:
    """Write one line to the program's stderr, whole, and only if it has one."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        sys.stderr.write(f"multiprocessing_pdb: {line}\n")
        sys.stderr.flush()


def announce(rank: Rank, place: str, why: str, port: str) -> None:
    """Say on stderr where this rank stopped and which command opens the console."""
    prefix = f"{VARIABLE}={shlex.quote(os.environ[VARIABLE])} " if os.environ.get(VARIABLE) else ""
    command = f"{prefix}{shlex.quote(sys.executable)} -m multiprocessing_pdb {rank.job}"
    tcp = f" (tcp {port})" if port else ""
    name = f"rank {rank.label}" if rank.number is not None else f"process {rank.label}"
    tell(f"{name} on {rank.host} stopped at {place}, {why}{tcp}; open the console with: {command}")
