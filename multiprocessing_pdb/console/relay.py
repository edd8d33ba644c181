"""Relay for a console on another node: serves it over stdin and stdout, for the ranks of this node.

ssh or srun starts the relay and secures the connection. When the console exits, stdin ends, the relay ends,
and the ranks stay stopped.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from typing import BinaryIO

from multiprocessing_pdb.console.link import Link, LinkClosedError
from multiprocessing_pdb.console.source import LocalSource
from multiprocessing_pdb.wire.framing import Decoder, Frame, encode

# Login scripts may print before the relay. The console ignores everything up to this line.
GREETING = b"multiprocessing_pdb relay 1\n"


class _Relay:
    """The links of this node by number, and the output stream to the console."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._warnings: list[str] = []
        self._source = LocalSource(self._warnings.append)
        self._links: dict[int, Link] = {}
        self._numbers: dict[int, int] = {}

    def send(self, frame: Frame) -> None:
        """Send one frame to the console."""
        self._output.write(encode(frame))
        self._output.flush()

    def do(self, frame: Frame) -> None:
        """Perform a request of the console."""
        op, number = frame.get("op"), frame.get("link")
        link = self._links.get(number) if isinstance(number, int) else None
        if op == "refresh":
            armed = frame.get("armed") is True
            stems = {stem: self._number(link) for stem, link in self._source.refresh(armed=armed).items()}
            self.send({"id": frame.get("id"), "stems": stems, "warnings": self._warnings})
            self._warnings.clear()
        elif op == "armed":
            self.send({"id": frame.get("id"), "processes": self._source.list_armed()})
        elif op == "deaths":
            self.send({"id": frame.get("id"), "processes": self._source.take_deaths()})
        elif op == "processes":
            job, action = str(frame.get("job")), str(frame.get("action"))
            self.send({"id": frame.get("id"), "processes": self._source.list_processes(job, action)})
        elif op == "send" and link is not None and isinstance(frame.get("frame"), dict):
            with contextlib.suppress(LinkClosedError):  # forward() reports it
                link.send(frame["frame"])
        elif op == "kill" and link is not None:
            with contextlib.suppress(LinkClosedError):
                link.kill()

    def _number(self, link: Link) -> int:
        number = self._numbers.setdefault(id(link), len(self._numbers) + 1)
        self._links[number] = link  # keep the link, so that its id is not reused
        return number

    def forward(self) -> None:
        """Forward the answers of ranks, and report closed links."""
        for number, link in list(self._links.items()):
            while link.inbox:
                self.send({"link": number, "frame": link.inbox.popleft()})
            if link.closed:
                self.send({"link": number, "closed": link.closed})
                del self._links[number]

    def watch(self) -> dict[int, Link]:
        """Return the links to wait on, by descriptor."""
        return {link.channel.fileno(): link for link in self._links.values() if not link.closed}


def serve(source: BinaryIO, output: BinaryIO) -> None:
    """Serve until `source` ends. Raises FrameError for invalid data."""
    relay, decoder = _Relay(output), Decoder()
    output.write(GREETING)
    output.flush()
    while True:
        with selectors.DefaultSelector() as selector:
            selector.register(source.fileno(), selectors.EVENT_READ)
            for descriptor, link in relay.watch().items():
                selector.register(descriptor, selectors.EVENT_READ, link)
            for key, _ in selector.select():
                if key.data is not None:
                    key.data.channel.pump()
                    continue
                received = os.read(source.fileno(), 1 << 18)
                if not received:
                    return
                for frame in decoder.feed(received):
                    relay.do(frame)
        relay.forward()
