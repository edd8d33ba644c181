"""What goes wrong on a rank, for `--fault suite_faults:NAME`: called on every rank before the layout is built."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist


def act() -> None:
    """On rank 1 do what the next line of a file says; rank 0 goes on into the first collective."""
    if dist.get_rank() != 1:
        return
    path = Path(os.environ["MOEVERIFY_TEST_ACTS"])
    act, *rest = path.read_text().splitlines()
    path.write_text("\n".join(rest))
    if act == "raise":
        raise ZeroDivisionError("planted on rank 1")
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "hang":
        time.sleep(600)
