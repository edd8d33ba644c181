"""Requests from a rank that the other armed ranks of its job stop."""

from __future__ import annotations

import contextlib
import os

from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.store_count import StoreCount, spans_nodes
from multiprocessing_pdb.wire.framing import encode
from multiprocessing_pdb.wire.identity import FileOwner
from multiprocessing_pdb.wire.runtime_directory import CONTROL_SUFFIX, RuntimeDirectory


def ask_peers_to_stop(reason: str) -> int:
    """Request that every other armed rank stop at its next line; return the number reached on this machine.

    No collective. Ranks on other nodes are reached through the store of torch.distributed, which each of
    them polls five times per second. A running call into C must return first.
    """
    if spans_nodes():
        StoreCount().ask_to_stop()
    job, asked = identify(process=True).job, 0
    with contextlib.suppress(FileNotFoundError), RuntimeDirectory.open() as directory:
        for name in directory.names(CONTROL_SUFFIX):
            owner = FileOwner.parse(name.removesuffix(CONTROL_SUFFIX))
            if owner.job != job or owner.pid == os.getpid():
                continue
            with contextlib.suppress(OSError), directory.connect(name) as stream:
                stream.sendall(encode({"do": "stop", "reason": reason, "id": 1}))
                asked += bool(stream.recv(4096))  # it has received the request
    return asked
