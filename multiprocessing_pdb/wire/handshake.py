"""Authentication of TCP peers: a 256-bit token that is never sent, and nonces that never repeat.

The rank sends a fresh nonce. The console answers with its own nonce and an HMAC over both. The rank checks
it and proves itself in the same way. Both then derive one key per direction. Every later frame carries an
HMAC over its position in the stream, so that replayed or inserted bytes are rejected. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from multiprocessing_pdb.wire.framing import Frame, FrameError, Transform
from multiprocessing_pdb.wire.own_descriptors import move_above_standard_streams

TOKEN_BYTES = 32
VARIABLE = "MPDB_TOKEN_FILE"


class TokenError(PermissionError):
    """The token file is missing, accessible to others, or does not hold a 256-bit token."""


def token_path() -> Path:
    """Return the token file: MPDB_TOKEN_FILE, or one in the home directory, which nodes usually share."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".multiprocessing_pdb.token")


def create_token(path: Path) -> None:
    """Write a new token into a new file of mode 0600.

    Raises: FileExistsError if the file exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as stream:
        stream.write(secrets.token_hex(TOKEN_BYTES) + "\n")


def read_token(path: Path) -> bytes:
    """Return the token.

    Raises: TokenError unless the file is regular, owned by this user, and inaccessible to others.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        descriptor = move_above_standard_streams(opened)
    except OSError as error:
        raise TokenError(
            f"{path}: {error.strerror}; make one with python -m multiprocessing_pdb --make-token {path}"
        ) from None
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise TokenError(f"{path} must be a regular file of user {os.geteuid()} with mode 0600")
        text = stream.read(4 * TOKEN_BYTES).decode("ascii", "replace").strip()
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise TokenError(f"{path} does not hold {2 * TOKEN_BYTES} hexadecimal digits")
    return token


def _prove(token: bytes, role: bytes, rank_nonce: bytes, console_nonce: bytes) -> bytes:
    # Nonces have a fixed length, so the parts are unambiguous; the role prevents reflection of a proof.
    return hmac.digest(token, b"mpdb1 " + role + rank_nonce + console_nonce, "sha256")


def _read_hex(frame: Frame, name: str) -> bytes:
    text = frame.get(name)
    if not isinstance(text, str) or len(text) != 2 * TOKEN_BYTES:
        raise FrameError(f"{name} must be {2 * TOKEN_BYTES} hexadecimal digits")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise FrameError(f"{name} is not hexadecimal") from None


class FrameMac:
    """One direction of one connection: adds or checks the HMAC of consecutive frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def _sign(self, payload: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + payload, hashlib.sha256)

    def close(self, payload: bytes) -> bytes:
        """Return the payload preceded by its HMAC."""
        return self._sign(payload) + payload

    def open(self, sealed: bytes) -> bytes:
        """Return the payload of a sealed frame.

        Raises: FrameError if the frame was altered, repeated or reordered.
        """
        mark, payload = sealed[:32], sealed[32:]
        if not hmac.compare_digest(mark, self._sign(payload)):
            raise FrameError("a frame with a wrong seal")
        return payload


def _derive_macs(token: bytes, rank_nonce: bytes, console_nonce: bytes) -> tuple[FrameMac, FrameMac]:
    """Return the MACs of frames to the rank and of frames to the console."""
    return (
        FrameMac(_prove(token, b"key to rank", rank_nonce, console_nonce)),
        FrameMac(_prove(token, b"key to console", rank_nonce, console_nonce)),
    )


class Challenge:
    """The rank's side of the handshake of one connection."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(TOKEN_BYTES)

    def request(self) -> Frame:
        """Return the first frame of the connection."""
        return {"challenge": self._nonce.hex()}

    def verify(self, frame: Frame) -> tuple[Frame, Transform, Transform]:
        """Return our proof, the function that seals frames to send, and the one that checks received ones.

        Raises: FrameError if the console's proof is wrong.
        """
        console_nonce, proof = _read_hex(frame, "nonce"), _read_hex(frame, "proof")
        if not hmac.compare_digest(proof, _prove(self._token, b"console", self._nonce, console_nonce)):
            raise FrameError("a wrong proof")
        ours = _prove(self._token, b"rank", self._nonce, console_nonce)
        to_rank, to_console = _derive_macs(self._token, self._nonce, console_nonce)
        return {"proof": ours.hex()}, to_console.close, to_rank.open


class Response:
    """The console's side of the handshake of one connection."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(TOKEN_BYTES)
        self._rank_nonce = b""

    def answer(self, frame: Frame) -> Frame:
        """Return our nonce and proof for the rank's challenge."""
        self._rank_nonce = _read_hex(frame, "challenge")
        proof = _prove(self._token, b"console", self._rank_nonce, self._nonce)
        return {"nonce": self._nonce.hex(), "proof": proof.hex()}

    def verify(self, frame: Frame) -> tuple[Transform, Transform]:
        """Return the function that seals frames to send, and the one that checks received ones.

        Raises: FrameError if the rank does not know the token.
        """
        if not hmac.compare_digest(
            _read_hex(frame, "proof"), _prove(self._token, b"rank", self._rank_nonce, self._nonce)
        ):
            raise FrameError("the rank did not prove that it knows the token")
        to_rank, to_console = _derive_macs(self._token, self._rank_nonce, self._nonce)
        return to_rank.close, to_console.open
