"""Links: connections to one stopped rank each, over a unix socket or TCP."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from multiprocessing_pdb.wire.framing import Decoder, Frame, FrameError, Transform, encode
from multiprocessing_pdb.wire.handshake import Response
from multiprocessing_pdb.wire.peer_credentials import check_peer
from multiprocessing_pdb.wire.process_exit import ProcessExit
from multiprocessing_pdb.wire.procfs import is_alive, read_command, read_start, send_signal
from multiprocessing_pdb.wire.runtime_directory import RuntimeDirectory

_CONNECT_SECONDS = 2.0
_TRIES = 8  # attempts at a proof: during a flood the rank may disconnect the wrong peer
_END_SECONDS = 0.2  # a process that ends closes its connections before it is gone
PEER_CLOSED = "the connection was closed"


class LinkClosedError(ConnectionError):
    """The rank at the other end is gone, or sent an invalid frame."""


class Channel(Protocol):
    """An object to wait on. It puts the received frames into the inboxes of links."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""

    def pump(self) -> None:
        """Read the available data without waiting."""


class Link(Protocol):
    """A connection to one stopped rank."""

    inbox: deque[Frame]
    closed: str

    @property
    def channel(self) -> Channel:
        """The channel that fills the inbox."""

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises LinkClosedError."""

    def explain_close(self) -> str:
        """Return why the link is closed, and whether the process lives where that is known."""

    def kill(self) -> None:
        """Kill the rank's process, even if it does not answer."""

    def close(self) -> None:
        """End the connection. The rank's state does not change."""


class SocketLink:
    """Link over a connected socket. `pid` is the peer of a unix socket according to the kernel, 0 for TCP."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.inbox: deque[Frame] = deque()
        self.closed = ""
        self._connection = connection
        self._pid = pid
        self._start = read_start(pid)
        self._command = read_command(pid) if pid else ""
        self.exit = ProcessExit(pid) if pid else None
        self._decoder = Decoder()
        self._seal: Transform | None = None

    @property
    def channel(self) -> Channel:
        """The link itself."""
        return self

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._connection.fileno()

    def prove(self, token: bytes, seconds: float) -> None:
        """Answer the challenge of a rank behind TCP.

        Raises LinkClosedError when either side does not know the token.
        """
        response = Response(token)
        try:
            self._send(response.answer(self._await_frame(seconds)))
            self._seal, self._decoder.unseal = response.verify(self._await_frame(seconds))
        except FrameError as error:
            self._fail(str(error))
            raise LinkClosedError(self.closed) from None
        except LinkClosedError:
            if self.closed == PEER_CLOSED:
                self.closed = "the rank refused the proof of the token; is it the same token?"
            raise LinkClosedError(self.closed) from None

    def _await_frame(self, seconds: float) -> Frame:
        deadline = time.monotonic() + seconds
        while not self.inbox:
            left = deadline - time.monotonic()
            if left <= 0 or self.closed:
                raise LinkClosedError(
                    self.closed or "no answer to the proof of the token; is it the same token?"
                )
            wait([self], left)
        return self.inbox.popleft()

    def pump(self) -> None:
        """Read the available frames into the inbox."""
        if self.closed:
            return
        try:
            self._connection.setblocking(False)
            received = self._connection.recv(1 << 18)
            if not received:
                self._fail(PEER_CLOSED)
            self.inbox.extend(self._decoder.feed(received))
        except BlockingIOError:
            pass
        except (OSError, FrameError) as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        self.closed = self.closed or why
        self._connection.close()

    def _send(self, frame: Frame) -> None:
        if self.closed:
            raise LinkClosedError(self.closed)
        try:
            self._connection.settimeout(_CONNECT_SECONDS)
            self._connection.sendall(encode(frame, self._seal))
        except OSError as error:
            self._fail(str(error))
            raise LinkClosedError(self.closed) from None

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises LinkClosedError."""
        self._send(frame)

    def explain_close(self) -> str:
        """Return why the link is closed, and whether the process lives."""
        deadline = time.monotonic() + _END_SECONDS
        while self.closed == PEER_CLOSED and is_alive(self._pid, self._start):
            if time.monotonic() > deadline:
                command = read_command(self._pid)
                if command != self._command:
                    return f"{self.closed}: the process has executed another program, {command[:200]}"
                return (
                    f"{self.closed}, and the process lives: it runs on, or has closed its descriptors or"
                    " executed another program; ls shows it where it is stopped"
                )
            time.sleep(0.01)
        return self.closed

    def kill(self) -> None:
        """Kill the process: by its pid on this machine, or by a request over TCP."""
        if self.closed:
            return
        if self._pid:
            send_signal(self._pid, self._start, signal.SIGKILL)
        else:
            self._send({"do": "kill"})

    def close(self) -> None:
        self._fail("closed here")
        if self.exit is not None:
            self.exit.close()


def wait(channels: Iterable[Channel], seconds: float) -> None:
    """Wait until a channel is readable, and pump each that is."""
    with selectors.DefaultSelector() as selector:
        for channel in {id(channel): channel for channel in channels}.values():
            if channel.fileno() >= 0:
                selector.register(channel.fileno(), selectors.EVENT_READ, channel)
        if not selector.get_map():
            time.sleep(min(seconds, 0.05))
            return
        for key, _ in selector.select(max(0.0, seconds)):
            key.data.pump()


def connect_local(directory: RuntimeDirectory, name: str) -> SocketLink:
    """Return a link to a socket in the runtime directory.

    Raises ConnectionRefusedError when no process listens any more, UnauthenticatedPeerError when one of
    another user does, and OSError otherwise.
    """
    connection = directory.connect(name, _CONNECT_SECONDS)
    return SocketLink(connection, check_peer(connection))


def connect_tcp(address: str, token: bytes) -> SocketLink:
    """Return an authenticated link to a rank that listens on TCP.

    Raises OSError when no rank listens, and LinkClosedError when the tokens differ.
    """
    host, _, port = address.rpartition(":")
    for _ in range(_TRIES - 1):
        with contextlib.suppress(LinkClosedError):
            return _prove_tcp(host, int(port), token)
    return _prove_tcp(host, int(port), token)


def _prove_tcp(host: str, port: int, token: bytes) -> SocketLink:
    link = SocketLink(socket.create_connection((host.strip("[]"), port), _CONNECT_SECONDS), 0)
    link.prove(token, _CONNECT_SECONDS)
    return link
