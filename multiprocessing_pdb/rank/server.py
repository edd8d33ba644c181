"""Server of a rank: a daemon thread that authenticates consoles and transfers frames."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count

from multiprocessing_pdb.rank.descriptors import above_standard_streams
from multiprocessing_pdb.rank.unstopped import UNSTOPPED
from multiprocessing_pdb.wire.framing import LIMIT, Decoder, Frame, FrameError, Transform, encode
from multiprocessing_pdb.wire.handshake import Challenge
from multiprocessing_pdb.wire.peer_credentials import UnauthenticatedPeerError, check_peer

_HANDSHAKE_SECONDS = 5.0  # a TCP peer without a valid proof by then is disconnected
_HANDSHAKE_LIMIT = 1024  # bytes of a frame before authentication, to bound memory
_BACKLOG_LIMIT = 4 * LIMIT  # unread bytes before a console is disconnected
_MOST_CONNECTIONS = 64
_MOST_UNAUTHENTICATED = 256
_TICK_SECONDS = 2.0
_NUMBERS = count(1)  # of connections, across servers: the next stop of a thread has another server


class Connection:
    """A connected console, or a TCP peer that has yet to prove that it knows the token."""

    def __init__(self, number: int, stream: socket.socket, challenge: Challenge | None, address: str) -> None:
        self.number = number
        self.stream = stream
        self.challenge = challenge
        self.address = address
        self.deadline = time.monotonic() + _HANDSHAKE_SECONDS
        self.decoder = Decoder(_HANDSHAKE_LIMIT if challenge else LIMIT)
        self.seal: Transform | None = None
        self.outgoing = bytearray()

    def authenticate(self, frame: Frame) -> None:
        """Accept a peer with a valid proof. Raises FrameError for an invalid one."""
        assert self.challenge is not None
        proof, self.seal, self.decoder.unseal = self.challenge.verify(frame)
        self.outgoing += encode(proof)
        self.challenge = None
        self.decoder.limit = LIMIT


class Server(threading.Thread):
    """Thread that serves the listening sockets. Sockets other than unix sockets require the token.

    `receive` (for each frame), `leave` (after a connection has ended) and `tick` (every two seconds) run in
    this thread and must not block. Consoles are disconnected however the thread ends.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        receive: Callable[[Server, int, Frame], None],
        leave: Callable[[int], None],
        tick: Callable[[], None],
        token: bytes | None = None,
    ) -> None:
        super().__init__(name="multiprocessing_pdb", daemon=True)
        self._listeners: list[socket.socket] = []
        self._receive = receive
        self._leave = leave
        self._tick = tick
        self._token = token
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._closing_at: float | None = None
        self._wakeup, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._wakeup.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        for listener in listeners:
            self._add_listener(listener)

    def _add_listener(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)

    def replace_unix_listener(self, listener: socket.socket) -> None:
        """Replace the unix listener. Called by `tick` in this thread."""
        for old in [old for old in self._listeners if old.family == socket.AF_UNIX]:
            self._selector.unregister(old)
            self._listeners.remove(old)
            old.close()
        self._add_listener(listener)

    def send(self, number: int, frame: Frame) -> None:
        """Queue a frame for a connection, from any thread. A closed connection is ignored."""
        with UNSTOPPED, self._lock:
            connection = self._connections.get(number)
            if connection is None:
                return
            try:
                connection.outgoing += encode(frame, connection.seal)
            except FrameError as error:
                connection.outgoing += encode({"id": frame.get("id"), "error": str(error)}, connection.seal)
        self._wake()

    def shut(self, patience: float) -> None:
        """Stop listening, deliver queued frames for at most `patience` seconds, and end the thread."""
        self._closing_at = time.monotonic() + patience
        self._wake()
        if threading.current_thread() is not self:
            self.join(patience + 1.0)

    def abandon(self) -> None:
        """Close every descriptor, in a forked child, which does not have this thread."""
        streams = [connection.stream for connection in self._connections.values()]
        for descriptor in [*self._listeners, self._wakeup, self._waker, *streams]:
            descriptor.close()
        self._selector.close()

    def _wake(self) -> None:
        # a full pipe already wakes the thread; a closed one has no thread to wake
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def run(self) -> None:
        """Serve until `shut` is called."""
        next_tick = time.monotonic() + _TICK_SECONDS
        try:
            while not self._is_done():
                for key, events in self._selector.select(
                    0.2 if self._closing_at is not None else _TICK_SECONDS
                ):
                    if key.fileobj is self._wakeup:
                        self._wakeup.recv(4096)
                    elif key.data is None:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                    elif key.data.number in self._connections:  # otherwise evicted in this round
                        self._serve(key.data, events)
                self._set_interests()
                if time.monotonic() > next_tick and self._closing_at is None:
                    next_tick = time.monotonic() + _TICK_SECONDS
                    self._tick()
        finally:
            self.abandon()

    def _is_done(self) -> bool:
        if self._closing_at is None:
            return False
        with UNSTOPPED, self._lock:
            waiting = any(connection.outgoing for connection in self._connections.values())
        return not waiting or time.monotonic() > self._closing_at

    def _accept(self, listener: socket.socket) -> None:
        try:
            with above_standard_streams():
                stream, address = listener.accept()
        except OSError:
            return
        try:
            challenge = self._identify(stream)
        except (UnauthenticatedPeerError, OSError):
            stream.close()
            return
        if challenge is not None:
            self._evict_unauthenticated()
        consoles = sum(c.challenge is None for c in self._connections.values())
        if consoles >= _MOST_CONNECTIONS or self._closing_at is not None:
            stream.close()
            return
        stream.setblocking(False)
        source = str(address[0]) if challenge is not None else ""
        connection = Connection(next(_NUMBERS), stream, challenge, source)
        if challenge is not None:
            connection.outgoing += encode(challenge.request())
        with UNSTOPPED, self._lock:
            self._connections[connection.number] = connection
        self._selector.register(stream, selectors.EVENT_READ, connection)

    def _identify(self, stream: socket.socket) -> Challenge | None:
        """Return the challenge for a TCP peer, or None for a unix peer of the same user.

        Raises UnauthenticatedPeerError for any other peer.
        """
        if stream.family == socket.AF_UNIX:
            check_peer(stream)
            return None
        if self._token is None:
            raise UnauthenticatedPeerError("a TCP peer, and no token to ask for")
        return Challenge(self._token)

    def _evict_unauthenticated(self) -> None:
        """Disconnect an unauthenticated TCP peer if there are too many: a flood must not lock out the user.

        A random peer of the address with most unauthenticated connections is chosen. A real console needs
        only milliseconds for its proof, so it is rarely chosen, and it tries again.
        """
        waiting = [c for c in self._connections.values() if c.challenge is not None]
        if len(waiting) < _MOST_UNAUTHENTICATED:
            return
        ((crowded, _),) = Counter(c.address for c in waiting).most_common(1)
        self._disconnect(random.choice([c for c in waiting if c.address == crowded]))

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                with UNSTOPPED, self._lock:
                    sent = connection.stream.send(connection.outgoing[:65536])
                    del connection.outgoing[:sent]
            if events & selectors.EVENT_READ:
                received = connection.stream.recv(65536)
                if not received:
                    raise ConnectionResetError
                for frame in connection.decoder.feed(received):
                    if connection.challenge is not None:
                        connection.authenticate(frame)
                    else:
                        self._receive_safely(connection.number, frame)
        except BlockingIOError:
            pass
        except (OSError, FrameError):
            self._disconnect(connection)

    def _receive_safely(self, number: int, frame: Frame) -> None:
        """Handle a request and report its exceptions: this thread must survive to keep the rank reachable."""
        try:
            self._receive(self, number, frame)
        except Exception as error:  # for example while walking over the frames of running threads
            self.send(number, {"id": frame.get("id"), "error": f"{type(error).__name__}: {error}"[:2000]})

    def _set_interests(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            overdue = connection.challenge is not None and now > connection.deadline
            if overdue or len(connection.outgoing) > _BACKLOG_LIMIT:
                self._disconnect(connection)
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
            if self._selector.get_key(connection.stream).events != wanted:
                self._selector.modify(connection.stream, wanted, connection)

    def _disconnect(self, connection: Connection) -> None:
        with UNSTOPPED, self._lock:
            self._connections.pop(connection.number, None)
        self._selector.unregister(connection.stream)
        connection.stream.close()
        self._leave(connection.number)
