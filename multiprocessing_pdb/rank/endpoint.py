"""Endpoint of a rank: its socket file, optional TCP port, and announcement on stderr."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable

from multiprocessing_pdb.rank.descriptors import RoomForDescriptors
from multiprocessing_pdb.rank.server import Server
from multiprocessing_pdb.rank.unstopped import UNSTOPPED
from multiprocessing_pdb.wire.framing import Frame
from multiprocessing_pdb.wire.handshake import read_token, token_path
from multiprocessing_pdb.wire.identity import RankIdentity
from multiprocessing_pdb.wire.runtime_directory import VARIABLE, RuntimeDirectory

Receive = Callable[[Server, int, Frame], None]
Leave = Callable[[int], None]


class Endpoint:
    """A server and its socket file `name`. `tick` runs in the server's thread every two seconds.

    Raises OSError when the directory, the token file or the TCP address cannot be used.
    """

    def __init__(
        self,
        name: str,
        receive: Receive,
        leave: Leave,
        tcp: str | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._pid = os.getpid()
        self._is_hidden = False
        self._is_reported = False  # that consoles cannot reach it
        self._more_ticks = tick
        self._lock = threading.Lock()  # for hiding the file versus recreating it
        self._directory = RuntimeDirectory.open(create=True)
        listeners: list[socket.socket] = []
        try:
            token = read_token(token_path()) if tcp else None
            listeners.append(self._directory.listen(name))
            if tcp:
                listeners.append(_listen_tcp(tcp))
            self.tcp_address = ":".join(str(p) for p in listeners[1].getsockname()[:2]) if tcp else ""
            self.server = Server(listeners, receive, leave, self._tick, token)
        except BaseException:
            for listener in listeners:
                listener.close()
            self._directory.remove(name)
            self._directory.close()
            raise

    def start(self) -> None:
        """Start answering. Consoles that connected earlier have been waiting.

        Raises RuntimeError when no thread can start, and OSError when no descriptor is left.
        """
        try:
            self.server.start()
        except (RuntimeError, OSError):  # RuntimeError: at interpreter shutdown
            self.hide()
            self.abandon()
            raise

    def serves(self) -> bool:
        """Return whether the thread of this process runs that answers consoles."""
        return self._pid == os.getpid() and self.server.is_alive()

    def _tick(self) -> None:
        try:
            self._restore_file()
            self._is_reported = False
        except (OSError, ValueError) as error:
            if not self._is_reported:
                self._is_reported = True
                place = self._directory.path / self._name
                write_stderr(f"no console can reach {place} until this is mended: {error}")
        if self._more_ticks is not None:
            self._more_ticks()

    def _restore_file(self) -> None:
        """Listen again if a socket or its file is gone: a stopped rank must stay reachable."""
        with UNSTOPPED, self._lock:
            if self._is_hidden:
                return
            if self.tcp_address and not self.server.has_listener(is_unix=False):
                with RoomForDescriptors():
                    self.server.add_listener(_listen_tcp(self.tcp_address))
            if not (self.server.has_listener(is_unix=True) and self._directory.has(self._name)):
                with RoomForDescriptors():
                    self._listen_again()

    def _listen_again(self) -> None:
        directory = RuntimeDirectory.open(create=True)  # the directory may have been replaced
        try:
            listener = directory.listen(self._name)
        except BaseException:
            directory.close()
            raise
        self.server.replace_unix_listener(listener)
        self._directory.close()
        self._directory = directory

    def hide(self) -> None:
        """Remove the file, so that no console finds a server that is about to end."""
        with UNSTOPPED, self._lock:
            self._is_hidden = True
            with contextlib.suppress(OSError):  # the program has closed or removed the directory
                self._directory.remove(self._name)

    def close(self) -> None:
        """Remove the file, deliver queued frames, and stop."""
        self.hide()
        self.server.shut(patience=1.0)
        self._directory.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self.server.abandon()
        self._directory.close()


def _listen_tcp(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def write_stderr(line: str) -> None:
    """Write one line to the program's stderr, if it has one, bypassing pytest's capture."""
    with _without_capture(), contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        sys.stderr.write(f"multiprocessing_pdb: {line}\n")
        sys.stderr.flush()


def _without_capture() -> contextlib.AbstractContextManager[None]:
    """Suspend pytest's capture, as its own pdb does: captured output appears only after the test."""
    debugging = sys.modules.get("_pytest.debugging")
    manager = getattr(getattr(debugging, "pytestPDB", None), "_pluginmanager", None)
    capture = manager.getplugin("capturemanager") if manager is not None else None
    if capture is None:
        return contextlib.nullcontext()
    return capture.global_and_fixture_disabled()  # type: ignore[no-any-return]


def announce(rank: RankIdentity, place: str, reason: str, tcp_address: str) -> None:
    """Write to stderr where this rank stopped and which command opens the console."""
    prefix = f"{VARIABLE}={shlex.quote(os.environ[VARIABLE])} " if os.environ.get(VARIABLE) else ""
    command = f"{prefix}{shlex.quote(sys.executable)} -m multiprocessing_pdb {rank.job}"
    tcp = f" (tcp {tcp_address})" if tcp_address else ""
    name = f"rank {rank.label}" if rank.number is not None else f"process {rank.label}"
    write_stderr(f"{name} on {rank.host} stopped at {place}, {reason}{tcp}; open the console with: {command}")
