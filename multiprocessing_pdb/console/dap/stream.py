"""Editor connection: Debug Adapter Protocol messages from a process of this user on this machine.

Source: https://microsoft.github.io/debug-adapter-protocol/overview#base-protocol
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multiprocessing_pdb.console.printable import make_printable

Message = dict[str, Any]

_ESTABLISHED = "01"
_MOST_BYTES = 4 * 1024 * 1024
_MOST_HEADER_BYTES = 1024
_HEADER = re.compile(rb"Content-Length: *([0-9]{1,9})(?:\r\n[A-Za-z-]+: *[ -~]*)*")


class StreamError(ConnectionError):
    """The editor has disconnected, or the peer is not an editor."""


def listen(port: int) -> socket.socket:
    """Return a socket that listens on this machine only. Raises OSError when the port is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def check_user(connection: socket.socket, table: Path = Path("/proc/net/tcp")) -> None:
    """Accept only connections from processes of this user, since an editor's console can run any code.

    The kernel's table of TCP sockets contains the user of the other end, which is on the same machine.

    Raises StreamError for another user, and when the kernel does not name the user.
    """
    peer, own = connection.getpeername(), connection.getsockname()
    wanted = [_format_address(peer), _format_address(own)]
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        # A connection closed by its process has no inode, and the kernel reports root as its user.
        if len(fields) > 9 and fields[1:4] == [*wanted, _ESTABLISHED] and fields[9] != "0":
            if fields[7] == str(os.geteuid()):
                return
            raise StreamError(f"a process of user {fields[7]} was refused")
    raise StreamError("a connection whose user the kernel does not name was refused")


def _format_address(address: tuple[str, int]) -> str:
    # The table holds the four bytes in native byte order, as one number.
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


def _filter(value: Any) -> Any:
    """Return a value with printable texts: editors show the output of programs as terminals do."""
    if isinstance(value, str):
        return make_printable(value)
    if isinstance(value, dict):
        return {name: _filter(part) for name, part in value.items()}
    return [_filter(part) for part in value] if isinstance(value, list) else value


class EditorStream:
    """One editor's connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        self._sent = 0

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._connection.fileno()

    def receive(self) -> list[Message]:
        """Read the available messages, waiting for data.

        Raises StreamError at the end and for malformed data.

        A web page in the user's browser can also connect, but its data begins with an HTTP request line.
        """
        try:
            received = self._connection.recv(1 << 16)
        except OSError as error:
            raise StreamError(str(error)) from None
        if not received:
            raise StreamError("the editor has closed the connection")
        self._received += received
        return list(self._cut())

    def _cut(self) -> Iterator[Message]:
        while self._received:
            header, end, _ = self._received.partition(b"\r\n\r\n")
            if not end:
                known = b"Content-Length: "[: len(header)]
                if not header.startswith(known) or len(header) > _MOST_HEADER_BYTES:
                    raise StreamError("the received data is no message of the Debug Adapter Protocol")
                return
            match = _HEADER.fullmatch(bytes(header))
            length = int(match.group(1)) if match else -1
            if not 0 < length <= _MOST_BYTES:
                raise StreamError("the received data is no message of the Debug Adapter Protocol")
            begin = len(header) + len(end)
            if len(self._received) < begin + length:
                return
            payload = bytes(self._received[begin : begin + length])
            del self._received[: begin + length]
            try:
                message = json.loads(payload)
            except (ValueError, RecursionError):
                raise StreamError("a message that is not JSON") from None
            if not isinstance(message, dict):
                raise StreamError("a message that is no JSON object")
            yield message

    def send(self, message: Message) -> None:
        """Send a message with the next sequence number. Raises StreamError when the editor is gone."""
        self._sent += 1
        payload = json.dumps({"seq": self._sent, **_filter(message)}).encode()
        try:
            self._connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(payload), payload))
        except OSError as error:
            raise StreamError(str(error)) from None

    def send_event(self, event: str, body: Message) -> None:
        self.send({"type": "event", "event": event, "body": body})

    def close(self) -> None:
        self._connection.close()
