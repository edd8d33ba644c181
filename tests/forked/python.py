"""Python processes with torch already imported, for the tests of this pytest process."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from moeverify.verification.controller.machine import count_gpus

_FOLDER = Path(__file__).parent


class ForkedPython:
    """The server of this process, started with the first command. It dies with this process at the latest.

    No server runs for GPU tests, whose kernels no interpreter runs, or outside Linux.
    """

    def __init__(self) -> None:
        self._name = f"moeverify-tests-{os.getpid()}-{secrets.token_hex(8)}"
        self._client = [sys.executable, "-IS", str(_FOLDER / "client.py"), self._name]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_used = sys.platform == "linux" and count_gpus() == 0

    def command(self) -> list[str]:
        """Return the command words that replace `python`, for this process or any other."""
        if not self._is_used:
            return [sys.executable]
        if self._process is None:
            self._process = self._start()
        return self._client

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Start Python as users do, for tests of startup and shutdown."""
        before, self._is_used = self._is_used, False
        yield
        self._is_used = before

    def torchrun(self, num_ranks: int, *options: str) -> list[str]:
        """Return the command words of torchrun, which starts a program on ranks that are forked, too."""
        words = [*self.command(), "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), *options]
        return [*words, "--no-python", *self.command()]

    def agent_command(self) -> list[str]:
        """Return the replacement of `moeverify.verification.launch.monitor.agent_command()`."""
        return [*self.command(), "-m", "moeverify.verification.launch.agent"]

    def stop(self) -> None:
        """End the server and every process that it has forked."""
        if self._process is not None:
            self._process.kill()
            said, _ = self._process.communicate()
            sys.stderr.write(said.decode())

    def _start(self) -> subprocess.Popen[bytes]:
        # An abstract socket leaves no file. Clients wait in its queue until the server has its imports.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + self._name)
            listener.listen(64)
            words = [
                _FOLDER / "server.py",
                str(listener.fileno()),
                str(os.getpid()),
                *self._client,
                "-" * 4096,
            ]
            return subprocess.Popen(
                [sys.executable, *words],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                pass_fds=[listener.fileno()],
                # Imports keep these streams, so their files must be replaceable in forks: only pipes are.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
