"""Asking the other armed ranks of this job to stop, from within a rank."""

from __future__ import annotations

import contextlib
import os

from multiprocessing_pdb.rank.descriptors import above_standard_streams
from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.store_count import StoreCount, spans_nodes
from multiprocessing_pdb.wire.framing import encode
from multiprocessing_pdb.wire.identity import FileOwner
from multiprocessing_pdb.wire.runtime_directory import CONTROL_SUFFIX, RuntimeDirectory


def ask_peers_to_stop(reason: str) -> int:
    """Ask every other armed rank to stop at its next line, and return how many on this machine were asked.

    No collective. Ranks of other nodes are asked through torch.distributed's store, which each looks at five
    times a second; a call into C has to end first.
    """
    if spans_nodes():
        StoreCount().ask_to_stop()
    job, asked = identify(process=True).job, 0
    with (
        contextlib.suppress(FileNotFoundError),
        above_standard_streams(),
        RuntimeDirectory.open() as directory,
    ):
        for name in directory.names(CONTROL_SUFFIX):
            owner = FileOwner.parse(name.removesuffix(CONTROL_SUFFIX))
            if owner.job != job or owner.pid == os.getpid():
                continue
            with contextlib.suppress(OSError), directory.connect(name) as stream:
                stream.sendall(encode({"do": "stop", "reason": reason, "id": 1}))
                asked += bool(stream.recv(4096))  # it has taken the request
    return asked
