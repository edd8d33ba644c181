"""Identification of the calling thread, at a stop only and without a collective."""

from __future__ import annotations

import os
import socket
import sys
import threading

from multiprocessing_pdb.wire.identity import RankIdentity, name_job, read_rank
from multiprocessing_pdb.wire.procfs import read_environ, read_start


def _ask_torch() -> tuple[int | None, int | None]:
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    except (AttributeError, RuntimeError, ValueError):  # partly imported, or shutting down
        pass
    return None, None


def _inherits_rank(number: int | None) -> bool:
    """Return whether the rank is inherited: a data loader's worker has its parent's rank variables."""
    loader = sys.modules.get("torch.utils.data")
    if loader is not None and loader.get_worker_info() is not None:
        return True
    context = sys.modules.get("multiprocessing.process")
    parent = context.parent_process() if context is not None else None
    if parent is None:
        return False
    inherited, _ = read_rank(read_environ(parent.pid or 0))
    return inherited == number


def identify(*, process: bool = False) -> RankIdentity:
    """Return the identity of the calling thread, or of its process with `process`.

    Prefers torch.distributed if it is initialized, then the environment.
    """
    pid = os.getpid()
    number, world = _ask_torch()
    if number is None:
        number, world = read_rank(os.environ)
    label = f"p{pid}" if number is None else str(number)
    if number is not None and _inherits_rank(number):
        label, number = f"{number}.p{pid}", None
    if not process and threading.current_thread() is not threading.main_thread():
        label, number = f"{label}.t{threading.get_native_id()}", None
    job = name_job(os.environ, os.getpgrp())
    return RankIdentity(job, label, number, world, socket.gethostname(), pid, read_start(pid))
