"""Sources of stopped ranks: one per node, and one per rank behind TCP."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from multiprocessing_pdb.console import processes
from multiprocessing_pdb.console.deaths import Death, describe_death
from multiprocessing_pdb.console.link import Link, LinkClosedError, SocketLink, connect_local, connect_tcp
from multiprocessing_pdb.wire.identity import FileOwner
from multiprocessing_pdb.wire.peer_credentials import UnauthenticatedPeerError
from multiprocessing_pdb.wire.process_exit import ProcessExit
from multiprocessing_pdb.wire.procfs import is_alive
from multiprocessing_pdb.wire.runtime_directory import CONTROL_SUFFIX, SOCKET_SUFFIX, RuntimeDirectory

_RETRY_SECONDS = 0.5


class Source(Protocol):
    """Interface of a source of stopped ranks."""

    def begin(self, op: str, **fields: Any) -> None:
        """Start a request, so that many sources work concurrently and the following call waits less.

        `op` with its fields is `refresh` (armed), `armed`, `processes` (job, action) or `deaths`. Answers
        do not change.
        """

    def refresh(self, *, armed: bool = False) -> dict[str, Link]:
        """Return a link to each stopped rank, or to each armed process, by the stem of its file.

        Existing links are kept.
        """

    def list_armed(self) -> list[dict[str, Any]]:
        """Return the records of armed processes that are not stopped."""

    def list_processes(self, job: str, action: str) -> list[dict[str, Any]]:
        """Return the processes of a job with the results of `action` ("list", "stacks", "kill", "arm")."""

    def take_deaths(self) -> list[Death]:
        """Return the ranks that have died since the last call."""

    def close(self) -> None:
        """Close all links. The ranks' state does not change."""


Warn = Callable[[str], None]


class LocalSource:
    """The runtime directory of this machine."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._links: dict[str, SocketLink] = {}
        self._deaths: dict[tuple[int, int], Death] = {}  # by pid and start, each once
        self._num_taken = 0

    def begin(self, op: str, **fields: Any) -> None:
        """Do nothing: local requests take no time."""

    def refresh(self, *, armed: bool = False) -> dict[str, Link]:
        """Return the links. Remove socket files of dead processes."""
        suffix = CONTROL_SUFFIX if armed else SOCKET_SUFFIX
        try:
            directory = RuntimeDirectory.open()
        except FileNotFoundError:
            return {}
        with directory:
            names = directory.names(suffix)
            for name in [name for name in self._links if name.endswith(suffix)]:
                self._links[name].pump()
                if self._links[name].closed or name not in names:
                    link = self._links.pop(name)
                    self._look_for_death(directory, name, link.exit)
                    link.close()
            for name in names:
                if name not in self._links:
                    self._connect(directory, name)
        found = self._links.items()
        return {name.removesuffix(suffix): link for name, link in found if name.endswith(suffix)}

    def _connect(self, directory: RuntimeDirectory, name: str) -> None:
        inode = directory.find_inode(name)
        try:
            self._links[name] = self._connect_patiently(directory, name)
        # Sockets are named only after they listen: the process has died, or has executed another program.
        except ConnectionRefusedError:
            self._look_for_death(directory, name, None)
            directory.remove(name, inode)
        except FileNotFoundError:
            pass  # it has resumed
        except (UnauthenticatedPeerError, OSError) as error:
            self._warn(f"{name}: {error}")

    def _connect_patiently(self, directory: RuntimeDirectory, name: str) -> SocketLink:
        """Return a link. A rank that has closed its descriptors listens again after a moment."""
        owner, deadline = FileOwner.parse(name.rpartition(".")[0]), time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                return connect_local(directory, name)
            except ConnectionRefusedError:
                if not is_alive(owner.pid, owner.start) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _look_for_death(self, directory: RuntimeDirectory, name: str, end: ProcessExit | None) -> None:
        owner = FileOwner.parse(name.rpartition(".")[0])
        if is_alive(owner.pid, owner.start) or (owner.pid, owner.start) in self._deaths:
            return
        status = (end or ProcessExit(owner.pid)).read_status()
        death = describe_death(directory, owner, status, is_left=directory.has(name))
        if death is not None:
            self._deaths[owner.pid, owner.start] = death

    def take_deaths(self) -> list[Death]:
        """Return the ranks that have died since the last call."""
        for armed in (False, True):
            self.refresh(armed=armed)
        found = list(self._deaths.values())[self._num_taken :]
        self._num_taken += len(found)
        return found

    def list_armed(self) -> list[dict[str, Any]]:
        """Return the records of live armed processes."""
        return processes.read_armed()

    def list_processes(self, job: str, action: str) -> list[dict[str, Any]]:
        """Return the processes of a job on this machine."""
        return processes.list_processes(job, action)

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class TcpSource:
    """Ranks that listen on TCP, one per address."""

    def __init__(self, addresses: list[str], token: bytes, warn: Warn) -> None:
        self._addresses = addresses
        self._token = token
        self._warn = warn
        self._links: dict[str, SocketLink] = {}

    def begin(self, op: str, **fields: Any) -> None:
        """Do nothing: existing links take no time."""

    def refresh(self, *, armed: bool = False) -> dict[str, Link]:
        """Return a link per authenticated address. Armed processes have none, since they do not listen."""
        if armed:
            return {}
        for address in self._addresses:
            known = self._links.get(address)
            if known is not None:
                known.pump()
                if not known.closed:
                    continue
                del self._links[address]
            try:
                self._links[address] = connect_tcp(address, self._token)
            except ConnectionRefusedError:
                pass  # not stopped
            except (LinkClosedError, OSError) as error:
                self._warn(f"{address}: {error}")
        return {f"tcp+{address}+0-0": link for address, link in self._links.items()}

    def list_armed(self) -> list[dict[str, Any]]:
        """Return an empty list: TCP reaches only stopped ranks."""
        return []

    def list_processes(self, job: str, action: str) -> list[dict[str, Any]]:
        """Return an empty list: TCP reaches only stopped ranks."""
        return []

    def take_deaths(self) -> list[Death]:
        """Return an empty list: the exit of a process is known only on its own machine."""
        return []

    def close(self) -> None:
        for link in self._links.values():
            link.close()
