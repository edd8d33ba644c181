"""A warm agent server, which keeps the imports of ranks between commands. Does not import torch.

`moeverify serve` starts it. Later commands of the same user find its socket by a key and skip the import,
which is more than half of the time of a small case. The key changes with the code of moeverify, with torch,
with the interpreter, with the device and with variables that libraries read when they are imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moeverify.errors import MachineError
from moeverify.verification.launch.forked_agents import STOP, ForkedAgent, request_agent, short_path

_IDLE = 300.0  # seconds after which a server ends whose command was killed
_PACKAGE = Path(__file__).parents[2]
# Variables that an interpreter and libraries read when they start.
_READ_ON_IMPORT = re.compile("ATEN|CUDA|GLOO|HF_|KMP|LD_|MKL|MOEVERIFY|NCCL|OMP|PYTHON|PYTORCH|TORCH|TRITON")


def start_warm_agent(plan: Path, device: str, log: BinaryIO) -> ForkedAgent | None:
    """Return the agent of a plan from a warm server, or None if none serves this user, code and device."""
    try:
        with _connect(device) as requests:
            return request_agent(requests, plan, log)
    except (OSError, MachineError):  # none was started, or it has ended: this launch imports by itself
        return None


def start_server(device: str, idle: float) -> int:
    """Start a server that ends after `idle` seconds without a launch. Return its process id.

    Raises: MachineError when it does not start, with its output.
    """
    words = [sys.executable, "-P", "-m", "moeverify.verification.launch.agent_server"]
    search_path = os.pathsep.join(filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    with contextlib.suppress(FileExistsError):
        _name_folder().mkdir(mode=0o700)
    # The process ends as soon as the server, which it forks, accepts launches.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [*words, str(_find_socket(device)), device, str(idle)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**os.environ, "PYTHONPATH": search_path},
            start_new_session=True,
            check=False,
        )
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if done.returncode != 0:
        raise MachineError(f"the server did not start: {said[-2000:]}")
    return int(said.split()[-1])


@contextlib.contextmanager
def warm_server(device: str) -> Iterator[None]:
    """Keep a server while the body runs, for many launches; one that serves already is used, and goes on.

    Without a server, which nothing but time depends on, each launch imports by itself.
    """
    place = None
    with contextlib.suppress(OSError, MachineError):
        if not is_serving(device):
            start_server(device, _IDLE)
            place = _find_socket(device)
    try:
        yield
    finally:
        if place is not None:
            _stop(place)


def is_serving(device: str) -> bool:
    """Return whether a server accepts launches of this user, code and device."""
    try:
        _connect(device).close()
    except OSError:
        return False
    return True


def stop_servers() -> int:
    """Ask all servers of this user to end after their launches. Return their number."""
    count = 0
    if not _name_folder().exists():
        return count
    for place in _find_folder().glob("*.socket"):
        count += _stop(place)
    return count


def _stop(place: Path) -> bool:
    """Ask the server of a socket to end after its launches. Return whether it was there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
        try:
            with short_path(place) as path:
                requests.connect(path)
            requests.send(STOP)
        except OSError:  # its server was killed
            place.unlink(missing_ok=True)
            return False
    return True


def _connect(device: str) -> socket.socket:
    place = _find_socket(device)
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short_path(place) as path:
            requests.connect(path)
    except OSError:
        requests.close()
        raise
    return requests


def _find_socket(device: str) -> Path:
    """Return the place of the socket. Raises: MachineError when others can enter its folder."""
    return _find_folder() / f"{_make_key(device)}.socket"


def _find_folder() -> Path:
    """Return the folder of this user's sockets.

    Raises: FileNotFoundError when no server was started yet; MachineError when others can enter it.
    """
    folder = _name_folder()
    state = folder.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o7077 or folder.is_symlink():
        raise MachineError(f"{folder} is not a folder of mode 700 of this user; remove it, or set TMPDIR")
    return folder


def _name_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"moeverify-serve-{os.getuid()}"


def _make_key(device: str) -> str:
    """Return 16 hex digits that change with everything that the imports of a rank depend on."""
    roots = (_PACKAGE, _PACKAGE.parent / "multiprocessing_pdb")
    files = sorted(path for root in roots for path in root.rglob("*.py"))
    facts = [
        device,
        sys.executable,
        sys.version,
        importlib.metadata.version("torch"),
        *(f"{path} {path.stat().st_mtime_ns} {path.stat().st_size}" for path in files),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if _READ_ON_IMPORT.match(name)),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
