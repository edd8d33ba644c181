"""Frames: a length of four bytes, then one JSON object. Received data is never unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

Frame = dict[str, Any]
Transform = Callable[[bytes], bytes]

LIMIT = 4 * 1024 * 1024
_HEADER = struct.Struct("!I")


class FrameError(ValueError):
    """Bytes that are not a valid frame; the connection they came from must be closed."""


def encode(frame: Frame, seal: Transform | None = None) -> bytes:
    """Return the bytes of one frame, sealed if the connection has a seal.

    Raises: FrameError if the frame is longer than the receiver's limit.
    """
    payload = json.dumps(frame, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    if seal is not None:
        payload = seal(payload)
    if len(payload) > LIMIT:
        raise FrameError(f"a frame of {len(payload)} bytes is over the limit of {LIMIT}")
    return _HEADER.pack(len(payload)) + payload


def _refuse_constant(name: str) -> None:
    raise FrameError(f"{name} is not JSON")


def decode(payload: bytes) -> Frame:
    """Return the object in `payload`.

    Raises: FrameError unless it is exactly one JSON object.
    """
    try:
        frame = json.loads(payload, parse_constant=_refuse_constant)
    except FrameError:
        raise
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from None
    if not isinstance(frame, dict):
        raise FrameError(f"a frame is a JSON object, not a {type(frame).__name__}")
    return frame


class Decoder:
    """A decoder that splits a byte stream into frames and holds at most one unfinished frame.

    `limit` is lowered until the peer is authenticated, so that nobody else can exhaust the memory.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.unseal: Transform | None = None
        self._held = bytearray()

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Yield each frame that `received` completes.

        Raises: FrameError on the first invalid frame.
        """
        self._held += received
        while len(self._held) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._held)
            if not 0 < length <= self.limit:
                raise FrameError(f"a frame of {length} bytes; the limit is {self.limit}")
            end = _HEADER.size + length
            if len(self._held) < end:
                return
            payload = bytes(self._held[_HEADER.size : end])
            del self._held[:end]
            yield decode(self.unseal(payload) if self.unseal is not None else payload)
