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
from typing import Any

from multiprocessing_pdb.rank.descriptors import Reserve, RoomForDescriptors
from multiprocessing_pdb.rank.unstopped import UNSTOPPED
from multiprocessing_pdb.wire.framing import LIMIT, Decoder, Frame, FrameError, Transform, encode
from multiprocessing_pdb.wire.handshake import Challenge
from multiprocessing_pdb.wire.own_sockets import OwnSocket
from multiprocessing_pdb.wire.peer_credentials import UnauthenticatedPeerError, check_peer

_HANDSHAKE_SECONDS = 5.0  # a TCP peer without a valid proof by then is disconnected
_HANDSHAKE_LIMIT = 1024  # bytes of a frame before authentication, to bound memory
_BACKLOG_LIMIT = 4 * LIMIT  # unread bytes before a console is disconnected
_MOST_CONNECTIONS = 64
_MOST_UNAUTHENTICATED = 256
_TICK_SECONDS = 2.0
_PAUSE_SECONDS = 0.1  # after a failure, which may repeat
_NUMBERS = count(1)  # of connections, across servers: the next stop of a thread has another server


class Connection:
    """A connected console, or a TCP peer that has yet to prove that it knows the token."""

    def __init__(self, number: int, stream: OwnSocket, challenge: Challenge | None, address: str) -> None:
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

    The program may close any descriptor, or open another file with its number. This thread then touches it
    no more, and `tick` is called to replace a lost listener. It polls, since an epoll descriptor can be lost.
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
        self._listeners: list[OwnSocket] = []
        self._receive = receive
        self._leave = leave
        self._tick = tick
        self._token = token
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._closing_at: float | None = None
        self._selector = selectors.PollSelector()
        self._reserve = Reserve(2)
        self._wakeup: OwnSocket | None = None
        self._waker: OwnSocket | None = None
        self._next_tick = time.monotonic() + _TICK_SECONDS
        self._open_waker()
        for listener in listeners:
            self.add_listener(listener)

    def _open_waker(self) -> None:
        self._wakeup, self._waker = map(OwnSocket, socket.socketpair())
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def add_listener(self, listener: socket.socket) -> None:
        """Serve a listening socket. Called before the start, or by `tick` in this thread."""
        own = OwnSocket(listener)
        self._listeners.append(own)
        self._selector.register(own, selectors.EVENT_READ)

    def has_listener(self, *, is_unix: bool) -> bool:
        """Return whether a unix or a TCP socket listens. The file of the unix socket may be gone."""
        return any((own.family == socket.AF_UNIX) == is_unix and own.is_open() for own in self._listeners)

    def replace_unix_listener(self, listener: socket.socket) -> None:
        """Replace the unix listener. Called by `tick` in this thread."""
        for old in [old for old in self._listeners if old.family == socket.AF_UNIX]:
            self._remove_listener(old)
        self.add_listener(listener)

    def _remove_listener(self, old: OwnSocket) -> None:
        self._selector.unregister(old)
        self._listeners.remove(old)
        old.close()

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
        for own in [*self._listeners, self._wakeup, self._waker, *streams]:
            if own is not None:
                own.close()
        self._reserve.give()
        self._selector.close()

    def _wake(self) -> None:
        # a full pipe already wakes the thread; a closed one has no thread to wake
        waker = self._waker
        with contextlib.suppress(OSError):
            if waker is not None and waker.is_open():
                waker.send(b"!")

    def run(self) -> None:
        """Serve until `shut` is called."""
        try:
            while not self._is_done():
                try:
                    self._serve_round()
                except Exception:  # whatever the program does to this thread, the rank must stay reachable
                    time.sleep(_PAUSE_SECONDS)
        finally:
            self.abandon()

    def _serve_round(self) -> None:
        self._drop_lost()
        is_awake = self._waker is not None and self._closing_at is None
        patience = max(0.0, self._next_tick - time.monotonic()) if is_awake else _PAUSE_SECONDS
        for key, events in self._selector.select(patience):
            if not key.fileobj.is_open():  # type: ignore[union-attr]
                continue  # closed by the program meanwhile
            if key.fileobj is self._wakeup:
                self._wakeup.recv(4096)
            elif key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif key.data.number in self._connections:  # otherwise evicted in this round
                self._serve(key.data, events)
        self._set_interests()
        if time.monotonic() > self._next_tick and self._closing_at is None:
            self._next_tick = time.monotonic() + _TICK_SECONDS
            self._tick()

    def _drop_lost(self) -> None:
        """Drop closed connections, open the waker again, and let `tick` replace a closed listener."""
        for connection in list(self._connections.values()):
            if not connection.stream.is_open():
                self._disconnect(connection)
        for listener in [listener for listener in self._listeners if not listener.is_open()]:
            self._remove_listener(listener)
            self._next_tick = 0.0
        ends = self._wakeup, self._waker
        if not all(end is not None and end.is_open() for end in ends):
            if self._wakeup is not None:
                self._selector.unregister(self._wakeup)
            self._wakeup = self._waker = None
            for end in ends:
                if end is not None:
                    end.close()
            with contextlib.suppress(OSError):
                self._open_waker()
        self._reserve.fill()

    def _is_done(self) -> bool:
        if self._closing_at is None:
            return False
        with UNSTOPPED, self._lock:
            waiting = any(connection.outgoing for connection in self._connections.values())
        return not waiting or time.monotonic() > self._closing_at

    def _accept(self, listener: OwnSocket) -> None:
        accepted = self._take_connection(listener)
        if accepted is None:
            return
        stream, address = accepted
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
        source = str(address[0]) if challenge is not None else ""
        connection = Connection(next(_NUMBERS), stream, challenge, source)
        if challenge is not None:
            connection.outgoing += encode(challenge.request())
        with UNSTOPPED, self._lock:
            self._connections[connection.number] = connection
        self._selector.register(stream, selectors.EVENT_READ, connection)

    def _take_connection(self, listener: OwnSocket) -> tuple[OwnSocket, Any] | None:
        """Return the next connection and its address, with a descriptor of the reserve if none is left."""
        try:
            return self._accept_next(listener)
        except BlockingIOError:
            return None
        except OSError:
            self._reserve.give()
        with RoomForDescriptors():
            return self._accept_next(listener)

    def _accept_next(self, listener: OwnSocket) -> tuple[OwnSocket, Any]:
        stream, address = listener.accept()
        return OwnSocket(stream), address

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
