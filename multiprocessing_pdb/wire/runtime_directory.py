"""The runtime directory, one per user and machine, mode 0700: stopped ranks create their sockets there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from multiprocessing_pdb.wire.own_descriptors import OwnDescriptor, move_above_standard_streams
from multiprocessing_pdb.wire.peer_credentials import check_peer

VARIABLE = "MPDB_DIR"
SOCKET_SUFFIX = ".sock"
ARMED_SUFFIX = ".armed"  # the record that an armed process writes about itself
CONTROL_SUFFIX = ".control"  # the socket of a running armed process
STACKS_SUFFIX = ".stacks"  # the output of faulthandler
SCRIPT_SUFFIX = ".py"  # code injected into a process that has not called arm()
_RECORD_LIMIT = 64 * 1024
_PATH_LIMIT = 104  # of sun_path: 108 bytes on Linux, 104 elsewhere, including the final zero


class DirectoryRefusedError(PermissionError):
    """The runtime directory cannot be trusted; the message gives the reason and the remedy."""


def runtime_path() -> Path:
    """Return the path of the runtime directory: MPDB_DIR, or a directory of this user in /tmp.

    TMPDIR and XDG_RUNTIME_DIR are not used: a batch job and a shell of the same user often disagree on
    them.
    """
    return Path(os.environ.get(VARIABLE) or f"/tmp/mpdb-{os.geteuid()}")


def _open_checked(path: Path) -> int:
    """Return a descriptor of a directory that only this user can use."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise DirectoryRefusedError(
                f"{path} is a symbolic link or no directory; set {VARIABLE} to a directory of your own"
            ) from None
        raise
    status = os.fstat(descriptor)
    reason = ""
    if status.st_uid != os.geteuid():
        reason = f"belongs to user {status.st_uid}; set {VARIABLE} to a directory of your own"
    elif status.st_mode & 0o077:
        reason = f"has mode {stat.S_IMODE(status.st_mode):04o}; run chmod 700 on it if its content is yours"
    if reason:
        os.close(descriptor)
        raise DirectoryRefusedError(f"{path} {reason}")
    return descriptor


def _open_socket() -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return socket.socket(fileno=move_above_standard_streams(opened.detach()))


class RuntimeDirectory:
    """An open, checked runtime directory, accessed only through its descriptor: it cannot be swapped."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the program may change its folder, and then close the descriptor
        self._opened: OwnDescriptor | None = OwnDescriptor(_open_checked(self.path))

    @property
    def _descriptor(self) -> int:
        """The directory's descriptor, opened again if the program has closed it, or -1 after `close`."""
        if self._opened is None:
            return -1
        if not self._opened.is_open():
            self._opened = OwnDescriptor(_open_checked(self.path))
        return self._opened.number

    @classmethod
    def open(cls, path: Path | None = None, *, create: bool = False) -> RuntimeDirectory:
        """Return the checked directory.

        Raises: DirectoryRefusedError for a symbolic link, another owner or a mode that gives others access;
        FileNotFoundError if it is missing and `create` is false.
        """
        path = path or runtime_path()
        if create:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        return cls(path)

    def __enter__(self) -> RuntimeDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def names(self, suffix: str) -> list[str]:
        """Return the names of finished files that end with `suffix`, sorted."""
        names = os.listdir(self._descriptor)  # noqa: PTH208  # pathlib cannot list a descriptor
        return sorted(name for name in names if name.endswith(suffix) and not name.startswith("."))

    def address(self, name: str) -> str:
        """Return a socket address for `name` that is short for any path and cannot be redirected."""
        short = f"/proc/self/fd/{self._descriptor}"
        if Path(short).exists():
            return f"{short}/{name}"
        plain = str(self.path / name)
        if len(os.fsencode(plain)) >= _PATH_LIMIT:
            raise DirectoryRefusedError(f"{plain} is too long for a socket; set {VARIABLE} to a shorter path")
        return plain

    def listen(self, name: str) -> socket.socket:
        """Return a listening socket whose file `name` has mode 0600.

        The file appears under its name only once the socket listens. A socket that refuses connections is
        therefore dead.
        """
        unfinished = f".{name}"
        self.remove(unfinished)
        listener = _open_socket()
        try:
            os.fchmod(listener.fileno(), 0o600)  # Linux gives the file this mode: it is never open to others
            listener.bind(self.address(unfinished))
            os.chmod(unfinished, 0o600, dir_fd=self._descriptor)
            listener.listen(64)
            os.rename(unfinished, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            listener.close()
            self.remove(unfinished)
            raise
        return listener

    def connect(self, name: str, seconds: float = 2.0) -> socket.socket:
        """Return a connection to the process that listens at `name`, after checking that it is this user's.

        Raises: ConnectionRefusedError if nobody listens any more; UnauthenticatedPeerError if another user
        does; OSError otherwise.
        """
        stream = _open_socket()
        try:
            stream.settimeout(seconds)
            stream.connect(self.address(name))
            check_peer(stream)
        except BaseException:
            stream.close()
            raise
        return stream

    def has(self, name: str) -> bool:
        """Return whether `name` exists and the directory is still reachable at its path."""
        try:
            here = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            reached = (self.path / name).lstat()
        except OSError:
            return False
        return (here.st_dev, here.st_ino) == (reached.st_dev, reached.st_ino)

    def remove(self, name: str, inode: int | None = None) -> None:
        """Remove `name` if it exists, and with `inode` only if it is still that file."""
        if inode is None or inode == self.find_inode(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._descriptor)

    def find_inode(self, name: str) -> int | None:
        """Return the number of the file, or None if there is none of this name."""
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_ino
        except FileNotFoundError:
            return None

    def create(self, name: str) -> int:
        """Return the descriptor of a new file of mode 0600 that did not exist before."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return move_above_standard_streams(os.open(name, flags, 0o600, dir_fd=self._descriptor))

    def write_record(self, name: str, record: dict[str, Any]) -> None:
        """Write a small JSON file of mode 0600 atomically."""
        unfinished = f".{name}"
        self.remove(unfinished)
        with os.fdopen(self.create(unfinished), "w", encoding="ascii") as stream:
            json.dump(record, stream)
        os.rename(unfinished, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def read_text(self, name: str, limit: int) -> str:
        """Return the text of a regular file of this user, at most `limit` bytes.

        Raises: OSError otherwise.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = move_above_standard_streams(os.open(name, flags, dir_fd=self._descriptor))
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise DirectoryRefusedError(f"{self.path / name} is no regular file of user {os.geteuid()}")
            return stream.read(limit).decode("utf-8", "replace")

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each readable record with its name; skip everything else."""
        for name in self.names(ARMED_SUFFIX):
            try:
                record = json.loads(self.read_text(name, _RECORD_LIMIT))
            except (OSError, ValueError):
                continue
            if isinstance(record, dict):
                yield name, record
