"""A process that has imported torch and the modules of moeverify, and forks the Python processes of tests.

`python server.py LISTENER PARENT CLIENT... PADDING` serves on the inherited socket until PARENT ends. The
import takes four seconds, longer than most launches of the tests. A forked process gets the environment,
folder, standard streams and import path of its `client.py`. If it launches ranks, CLIENT starts their agent.
PADDING makes room for the command line.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from moeverify.gc_pause import uncollected
from moeverify.verification.jobs import WORKER
from moeverify.verification.launch import monitor
from moeverify.verification.launch.agent import preload
from moeverify.verification.launch.die_with_parent import die_with
from moeverify.verification.launch.world import set_interpreter

_IMPORTS = (
    "torch.distributed.launcher.api",
    "torch.distributed.run",
    "moeverify.verification.launch.logs",
    "moeverify.report.figures",
    "moeverify.report.next_steps",
    "moeverify.report.progress",
    "moeverify.report.text",
)
# Packages of commands, which import hardly anything before they know that they need it.
_PACKAGES = ("moeverify.cases", "moeverify.cli", "moeverify.verification.controller")
# Variables that torch, its libraries and the interpreter read, or may read, before a fork.
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
    "LC_",
    "LANG",
    "PYTHON",
)
# Of these, variables that each process applies anew, those that torchrun sets for ranks, and the folder that
# torch sets in a process that builds an optimizer, such as that of the tests.
_SET_LATE = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_NCCL_ASYNC", "TORCHINDUCTOR_CACHE_DIR")

_PYTHONPATH = os.environ.get("PYTHONPATH", "")

Request = dict[str, Any]


class _Forked(Exception):
    """Raised in a forked process: it is the requested one."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request


class Server:
    """Fork server: forks a process for each client, forwards signals, and reports how the process ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._early = _pick_early(dict(os.environ))
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> Request:
        """Serve until this process is killed. Returns only in forked processes, with the request."""
        try:
            while True:
                for key, _ in self._selector.select():
                    key.data()
        except _Forked as forked:
            self._selector.close()
            self._listener.close()
            return forked.request

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        request = json.loads(data) if len(streams) == 3 else {}
        if request and self._can_serve(connection, request):
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                connection.close()
                raise _Forked(request | {"streams": streams, "server": server})
            self._follow(pid, connection)
        else:
            connection.close()
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
            # The client is gone. All ranks are in their agent's process group.
            self._selector.unregister(connection)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

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

    def _can_serve(self, connection: socket.socket, request: Request) -> bool:
        """Return whether a process with this environment would have imported exactly these modules."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        environment, folder = request["environment"], Path(request["folder"])
        is_ours = struct.unpack("3i", credentials)[1] == os.getuid()
        added = environment.get("PYTHONPATH", "").split(os.pathsep)
        return (
            is_ours
            and _pick_early(environment) == self._early
            and not any(_shadows(folder / entry) for entry in (_find_folder(request["words"]), *added))
        )


def _pick_early(environment: dict[str, str]) -> dict[str, str]:
    # Every agent of ranks without a GPU sets these to a value, also when they were unset.
    given = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **environment}
    return {
        name: value
        for name, value in given.items()
        if name.startswith(_READ_EARLY) and not name.startswith(_SET_LATE)
    }


def _shadows(folder: Path) -> bool:
    """Return whether the folder has a module that shadows an imported one, or a startup module."""
    for path in folder.iterdir() if folder.is_dir() else ():
        name = path.name.partition(".")[0]
        is_module = path.suffix in (".py", ".so", ".pyc") or (path.is_dir() and not path.suffix)
        if not is_module or name not in (*sys.modules, "usercustomize"):
            continue
        found = getattr(sys.modules.get(name), "__file__", None)
        if found is None or folder.resolve() not in Path(found).resolve().parents:
            return True
    return False


def _become(request: Request, found: list[str]) -> None:
    """Give this forked process a new process's session, streams, environment, folder and import path."""
    die_with(request["server"])
    os.setsid() if request["leads"] else os.setpgid(0, 0)
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    _open_streams()
    os.chdir(request["folder"])
    # The server is the kernel-level parent, and kills this process when its client ends.
    own, find_parent = os.getpid(), os.getppid
    os.getppid = lambda: request["parent"] if os.getpid() == own else find_parent()
    words = request["words"]
    sys.path[:] = [
        str(_find_folder(words).absolute()),
        *_replace_added(found, os.environ.get("PYTHONPATH", "")),
    ]
    sys.path_importer_cache.clear()
    tempfile.tempdir = None
    _show_command([sys.executable, *words])
    _customize()


def _customize() -> None:
    """Import `sitecustomize` like the interpreter; that of `moeverify watch` waits for torch, which is here."""
    with contextlib.suppress(ModuleNotFoundError):
        sitecustomize = importlib.import_module("sitecustomize")
        for hook in [each for each in sys.meta_path if type(each).__module__ == "sitecustomize"]:
            sys.meta_path.remove(hook)
            sitecustomize._start()


def _replace_added(path: list[str], added: str) -> list[str]:
    """Return the server's import path with its own PYTHONPATH replaced by these folders."""
    # Installed packages may have inserted folders before those; the first entry is the folder of this file.
    standard = next(index for index, entry in enumerate(path) if entry.endswith(".zip"))
    own = [os.path.realpath(entry) for entry in _PYTHONPATH.split(os.pathsep)]
    before = [entry for entry in path[1:standard] if os.path.realpath(entry) not in own]
    between = [str(Path(entry).absolute()) for entry in added.split(os.pathsep)] if added else []
    return [*before, *between, *path[standard:]]


def _open_streams() -> None:
    """Make Python's standard stream objects, which differ for files, pipes and terminals."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    for number, name, buffering, errors in (
        (1, "stdout", -1, "strict"),
        (2, "stderr", 1, "backslashreplace"),
    ):
        if os.environ.get("PYTHONUNBUFFERED"):
            raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
            stream = io.TextIOWrapper(raw, errors=errors, write_through=True)
        else:
            stream = open(number, "w", buffering=buffering, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _find_folder(words: list[str]) -> Path:
    """Return the first folder of the import path."""
    return Path() if words[0] in ("-m", "-c") else Path(words[0]).parent


def _run(words: list[str]) -> None:
    """Run the main module as the interpreter would."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # or it would exist twice
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv = words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, main.__dict__)


def _import_all() -> None:
    """Import torch, the modules of ranks, and those of the command line."""
    for name in _IMPORTS:
        importlib.import_module(name)
    for package in map(importlib.import_module, _PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    preload(WORKER, "cpu")


def _build_models() -> None:
    """Build the validators of all models, which each process would otherwise build at their first use."""
    left: list[type[BaseModel]] = [BaseModel]
    while left:
        models = left.pop().__subclasses__()
        left += models
        for model in models:
            model.model_rebuild(raise_errors=False)


def _skip_exit_functions() -> None:
    """Keep the exit functions of imported modules from running in each forked process.

    torch frees each of its libraries of operators, and formats the times of its compiler for a log.
    """
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)


def _end(code: int) -> None:
    """End like the interpreter, but without freeing imported modules: that takes a second, with no effect."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _show_command(words: list[str]) -> None:
    """Let /proc show this command line, by which tests find the remains of a launch."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def main() -> None:
    """Import the modules of ranks, and serve."""
    die_with(int(sys.argv[2]))
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    found = sys.path.copy()
    client = sys.argv[3:-1]
    set_interpreter("cpu")
    with uncollected():
        _import_all()
        _build_models()
    gc.freeze()  # as `preload` does with the imports of ranks
    _skip_exit_functions()
    monitor.agent_command = lambda: [*client, "-m", "moeverify.verification.launch.agent"]
    request = server.serve()
    _become(request, found)
    try:
        _run(request["words"])
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    _end(code)


if __name__ == "__main__":
    main()
