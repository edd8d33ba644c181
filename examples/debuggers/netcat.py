"""netcat.py HOST PORT: a terminal on a TCP port, for Monarch's debugger where netcat is not installed."""

import os
import select
import socket
import sys
import time


def connect(place: tuple[str, int]) -> socket.socket:
    """Return a connection. The debugger listens after the first breakpoint. Raises OSError after a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(place)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    with connect((sys.argv[1], int(sys.argv[2]))) as connection:
        while True:
            ready, _, _ = select.select([0, connection], [], [])
            for source in ready:
                received = os.read(source.fileno() if source is connection else 0, 65536)
                if not received:
                    sys.exit()
                if source is connection:
                    os.write(1, received)
                else:
                    connection.sendall(received)
