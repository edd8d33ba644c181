"""The door of a stopped rank: one daemon thread that lets consoles in and moves frames, nothing else."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from itertools import count

from multiprocessing_pdb.challenge import Challenge
from multiprocessing_pdb.credentials import StrangerError, check_peer
from multiprocessing_pdb.descriptors import above_standard
from multiprocessing_pdb.framing import LIMIT, Decoder, Frame, FrameError, Transform, encode

_ADMISSION_SECONDS = 5.0  # a stranger who says nothing is put out after this long
_STRANGER_LIMIT = 1024
_BACKLOG_LIMIT = 4 * LIMIT  # unread answers a console may leave before it is put out
_MOST_GUESTS = 64
_MOST_STRANGERS = 8  # over TCP, and not yet admitted: they must not keep the user out


class Guest:
    """One connection: a console that was let in, or somebody who must first prove the token."""

    def __init__(self, number: int, connection: socket.socket, challenge: Challenge | None) -> None:
        self.number = number
        self.connection = connection
        self.challenge = challenge
        self.deadline = time.monotonic() + _ADMISSION_SECONDS
        self.decoder = Decoder(_STRANGER_LIMIT if challenge else LIMIT)
        self.seal: Transform | None = None
        self.outgoing = bytearray()

    def admit(self, frame: Frame) -> None:
        """Let the guest in for a right proof. Raises FrameError for a wrong one."""
        assert self.challenge is not None
        proof, self.seal, self.decoder.unseal = self.challenge.judge(frame)
        self.outgoing += encode(proof)
        self.challenge = None
        self.decoder.limit = LIMIT


class CommandContext(threading.Thread):
    """Listens on `listeners` (unix sockets) and on `tcp` if one is given, and calls `receive` for each frame.

    `receive` and `leave` (a guest has gone) run in this thread and must not block.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        receive: Callable[[int, Frame], None],
        leave: Callable[[int], None],
        token: bytes | None = None,
    ) -> None:
        super().__init__(name="multiprocessing_pdb", daemon=True)
        self._listeners = listeners
        self._receive = receive
        self._leave = leave
        self._token = token
        self._guests: dict[int, Guest] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._closing_at: float | None = None
        self._bell, self._ringer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for waiting in [*listeners, self._bell]:
            waiting.setblocking(False)
            self._selector.register(waiting, selectors.EVENT_READ)
        self._ringer.setblocking(False)

    def send(self, number: int, frame: Frame) -> None:
        """Queue a frame for a guest, from any thread; nothing happens when the guest has gone."""
        with self._lock:
            guest = self._guests.get(number)
            if guest is None:
                return
            try:
                guest.outgoing += encode(frame, guest.seal)
            except FrameError as error:
                guest.outgoing += encode({"id": frame.get("id"), "error": str(error)}, guest.seal)
        self._ring()

    def shut(self, patience: float) -> None:
        """Stop listening now, deliver what is queued for `patience` seconds at most, and end the thread."""
        self._closing_at = time.monotonic() + patience
        self._ring()
        self.join(patience + 1.0)

    def abandon(self) -> None:
        """Close every descriptor, in a forked child, where this thread does not exist."""
        for held in [
            *self._listeners,
            self._bell,
            self._ringer,
            *(g.connection for g in self._guests.values()),
        ]:
            held.close()
        self._selector.close()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe rings already; a closed one has nobody to wake
            self._ringer.send(b"!")

    def run(self) -> None:
        """Serve until shut."""
        while not self._is_done():
            for key, events in self._selector.select(0.5 if self._is_hasty() else None):
                if key.fileobj is self._bell:
                    self._bell.recv(4096)
                elif key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._serve(key.data, events)
            self._set_interests()
        self.abandon()

    def _is_hasty(self) -> bool:
        return self._closing_at is not None or any(g.challenge for g in self._guests.values())

    def _is_done(self) -> bool:
        if self._closing_at is None:
            return False
        with self._lock:
            waiting = any(guest.outgoing for guest in self._guests.values())
        return not waiting or time.monotonic() > self._closing_at

    def _accept(self, listener: socket.socket) -> None:
        try:
            with above_standard():
                connection, _ = listener.accept()
        except OSError:
            return
        challenge = None
        try:
            if connection.family == socket.AF_UNIX:
                check_peer(connection)
            elif self._token is not None:
                challenge = Challenge(self._token)
        except (StrangerError, OSError):
            connection.close()
            return
        known = connection.family == socket.AF_UNIX or challenge is not None
        strangers = sum(guest.challenge is not None for guest in self._guests.values())
        crowded = len(self._guests) >= _MOST_GUESTS or (challenge and strangers >= _MOST_STRANGERS)
        if not known or crowded or self._closing_at is not None:
            connection.close()
            return
        connection.setblocking(False)
        guest = Guest(next(self._numbers), connection, challenge)
        if challenge is not None:
            guest.outgoing += encode(challenge.ask())
        with self._lock:
            self._guests[guest.number] = guest
        self._selector.register(connection, selectors.EVENT_READ, guest)

    def _serve(self, guest: Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    sent = guest.connection.send(guest.outgoing[:65536])
                    del guest.outgoing[:sent]
            if events & selectors.EVENT_READ:
                received = guest.connection.recv(65536)
                if not received:
                    raise ConnectionResetError
                for frame in guest.decoder.feed(received):
                    if guest.challenge is not None:
                        guest.admit(frame)
                    else:
                        self._receive(guest.number, frame)
        except BlockingIOError:
            pass
        except (OSError, FrameError):
            self._put_out(guest)

    def _set_interests(self) -> None:
        now = time.monotonic()
        for guest in list(self._guests.values()):
            overdue = guest.challenge is not None and now > guest.deadline
            if overdue or len(guest.outgoing) > _BACKLOG_LIMIT:
                self._put_out(guest)
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.outgoing else 0)
            if self._selector.get_key(guest.connection).events != wanted:
                self._selector.modify(guest.connection, wanted, guest)

    def _put_out(self, guest: Guest) -> None:
        with self._lock:
            self._guests.pop(guest.number, None)
        self._selector.unregister(guest.connection)
        guest.connection.close()
        self._leave(guest.number)
