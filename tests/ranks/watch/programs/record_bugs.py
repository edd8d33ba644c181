"""Records train_ep.py with one bug after the other, each on two ranks, into a folder that has the name of the bug.

    record_bugs.py FOLDER BUG...

`NAME=RUN` instead of a bug is the right script with the initial weights of another run, recorded as NAME.

Torch is imported once and the ranks are forked from here; each starts the recorder as `moeverify watch` lets the
processes of a script start it, and then runs the script from its beginning.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path

# DDP and optimizers import the compiler when they are first made: that is most of what a rank would do.
import torch._dynamo  # noqa: F401

from moeverify.capture.settings import Settings
from moeverify.capture.start import start

PROGRAM = Path(__file__).parent / "train_ep.py"
NUM_RANKS = 2


def run_rank(rank: int, port: int, out: Path, bug: str, weights: Path | None) -> None:
    """Train as a rank that torchrun has started, and end the process."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    settings = Settings(out=out, first=0, last=1, outputs=True, weights=weights)
    recorder = start(settings.model_dump_json(), str(rank), str(NUM_RANKS))
    sys.argv = [str(PROGRAM), "--bug", bug]
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except SystemExit as end:
        recorder.close()
        os._exit(0 if end.code in (None, 0) else 1)  # taking torch apart would be longer than the training


def find_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Run the ranks of each bug to their end; exits with the number of those that failed."""
    folder, bugs = Path(sys.argv[1]), sys.argv[2:]
    num_failed = 0
    for bug in bugs:
        name, _, weights = bug.partition("=")
        what = ("", Path(weights)) if weights else (bug, None)
        port, children = find_port(), []
        for rank in range(NUM_RANKS):
            children.append(os.fork())
            if children[-1] == 0:
                run_rank(rank, port, folder / name, *what)
        num_failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    raise SystemExit(num_failed)


if __name__ == "__main__":
    main()
