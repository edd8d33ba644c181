"""Records a program with one bug after another, each into a folder named after the bug.

record_bugs.py PROGRAM RANKS FOLDER BUG...

A bug is a value of `--bug`, with more arguments after it if needed, such as `swapped,--dtype,mixed`.
`NAME=RUN` instead of a bug is the right script with the initial weights of another run, recorded as NAME.

Torch, and the model of a program that needs transformers, are imported once and the ranks are forked from
here. Each rank starts the recorder as `moeverify watch` does in the processes of a script, and then runs the
script from its beginning.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

# DDP and optimizers import the compiler on first construction, which would take most of a rank's time.
import torch._dynamo  # noqa: F401

from moeverify.scripts.record.settings import Settings
from moeverify.scripts.record.start import start

PROGRAMS = Path(__file__).parent


def run_rank(
    program: str, rank: int, world_size: int, port: int, out: Path, bug: str, weights: Path | None
) -> None:
    """Train as a rank that torchrun has started, and end the process."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    settings = Settings(out=out, first=0, last=1, outputs=True, weights=weights)
    recorder = start(settings.model_dump_json(), str(rank), str(world_size))
    sys.argv = [program, "--bug", *bug.split(",")]
    code = 1
    try:
        runpy.run_path(str(PROGRAMS / program), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = 0 if end.code in (None, 0) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        recorder.close()
        os._exit(code)  # freeing torch would take longer than the training


def find_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Run the ranks of each bug to their end, and exit with the number of failed ranks."""
    program, num_ranks, folder, bugs = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    if "from small_qwen import" in (PROGRAMS / program).read_text():
        import small_qwen  # noqa: F401 - transformers takes longer to import than a rank trains
    num_failed = 0
    for bug in bugs:
        name, _, weights = bug.partition("=")
        what = ("", Path(weights)) if weights else (bug, None)
        port, children = find_port(), []
        for rank in range(num_ranks):
            children.append(os.fork())
            if children[-1] == 0:
                run_rank(program, rank, num_ranks, port, folder / name, *what)
        num_failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    raise SystemExit(num_failed)


if __name__ == "__main__":
    main()
