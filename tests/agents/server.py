"""A process that has imported what every agent of a launch imports, and forks agents for the tests.

`python server.py LISTENER PARENT PADDING` serves on the socket that it inherits, until PARENT ends. The import takes
four seconds, and most launches of the tests take less. The agent that is forked has what `client.py` was started
with: environment, folder, standard streams and import path. PADDING makes room for its command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from moeverify.launch import agent
from moeverify.launch.die_with_parent import die_with
from moeverify.launch.world import set_interpreter

_IMPORTS = (
    "torch.distributed.launcher.api",
    "moeverify.launch.logs",
    "moeverify.launch.caches",
    "moeverify.worker.main",
)
# What torch, its libraries and the interpreter read before an agent is forked, or may. PYTHONPATH is set again.
_READ_EARLY = (
    "TORCH",
    "PYTORCH",
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA",
    "NCCL",
    "GLOO",
    "TRITON",
    "LD_",
    "PYTHON",
    "HOME",
)


class Server:
    """Forks an agent for each client, sends it signals, and tells the client how it ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._early = _pick_early(dict(os.environ))
        own = [os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        # The first entry is the folder of this file.
        self._path = [entry for entry in sys.path[1:] if os.path.realpath(entry) not in own]
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        """Serve until this process is killed."""
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        request = json.loads(data) if len(streams) == 3 else {}
        if not request or not self._can_serve(connection, request["environment"], Path(request["folder"])):
            connection.close()
        else:
            pid = os.fork()
            if pid == 0:
                self._selector.close()
                self._listener.close()
                connection.close()
                _become_agent(request, streams, self._make_path(request["environment"]))
            self._follow(pid, connection)
        for stream in streams:
            os.close(stream)

    def _follow(self, pid: int, connection: socket.socket) -> None:
        ended = os.pidfd_open(pid)

        def forward() -> None:
            with contextlib.suppress(OSError):
                number = connection.recv(16)
                if number:
                    os.kill(pid, int(number))
                    return
            # The client is gone. No rank can hide: they are all in the agent's process group.
            self._selector.unregister(connection)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

        def bury() -> None:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._selector.unregister(ended)
            os.close(ended)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.send(str(status).encode())
            connection.close()

        self._selector.register(ended, selectors.EVENT_READ, bury)
        self._selector.register(connection, selectors.EVENT_READ, forward)
        with contextlib.suppress(OSError):
            connection.send(b"forked")

    def _can_serve(self, connection: socket.socket, environment: dict[str, str], folder: Path) -> bool:
        """Return whether an agent with this environment would have imported just what is imported here."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid() or _pick_early(environment) != self._early:
            return False
        added = environment.get("PYTHONPATH", "").split(os.pathsep)
        return not any(_shadows(folder / entry) for entry in (".", *added))

    def _make_path(self, environment: dict[str, str]) -> list[str]:
        added = environment.get("PYTHONPATH", "")
        return [os.curdir, *(added.split(os.pathsep) if added else ()), *self._path]


def _pick_early(environment: dict[str, str]) -> dict[str, str]:
    # These have a value in every agent for ranks without a GPU, whether they are set or not.
    given = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **environment}
    return {
        name: value for name, value in given.items() if name.startswith(_READ_EARLY) and name != "PYTHONPATH"
    }


def _shadows(folder: Path) -> bool:
    """Return whether the folder has another module for a name that is imported here, or one for start-up."""
    for path in folder.iterdir() if folder.is_dir() else ():
        name = path.name.partition(".")[0]
        is_module = path.suffix in (".py", ".so", ".pyc") or (path.is_dir() and not path.suffix)
        if not is_module or name not in (*sys.modules, "usercustomize"):
            continue
        found = getattr(sys.modules.get(name), "__file__", None)
        if found is None or folder.resolve() not in Path(found).resolve().parents:
            return True
    return False


def _become_agent(request: dict[str, Any], streams: list[int], path: list[str]) -> None:
    """Run the agent in this forked process as `python -m moeverify.launch.agent PLAN PARENT` would, to its end."""
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.path[:] = [str(Path.cwd() / entry) for entry in path]
        sys.path_importer_cache.clear()
        tempfile.tempdir = None
        sys.argv = [agent.__file__, request["plan"], str(os.getppid())]
        _show_command([sys.executable, "-m", agent.__name__, *sys.argv[1:]])
        agent.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _show_command(words: list[str]) -> None:
    """Let /proc show this command line, by which tests find what a launch has left behind."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def main() -> None:
    """Import what agents import, and serve."""
    die_with(int(sys.argv[2]))
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    set_interpreter("cpu")
    for name in _IMPORTS:
        importlib.import_module(name)
    server.serve()


if __name__ == "__main__":
    main()
