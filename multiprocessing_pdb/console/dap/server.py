"""`python -m multiprocessing_pdb --dap PORT`: serves editors one after another, until interrupted."""

from __future__ import annotations

import contextlib

from multiprocessing_pdb.console.dap.adapter import Adapter
from multiprocessing_pdb.console.dap.stream import EditorStream, StreamError, check_user, listen
from multiprocessing_pdb.console.registry import RankRegistry
from multiprocessing_pdb.console.terminal import warn


def serve_editors(registry: RankRegistry, port: int, deadline: float) -> int:
    """Serve editors. Return the exit code: 0 when interrupted, 2 if the port is unusable."""
    try:
        listener = listen(port)
    except (OSError, OverflowError) as error:
        warn(f"--dap {port}: {error}; choose a port that is free, or 0 for any")
        return 2
    with listener, contextlib.suppress(KeyboardInterrupt):
        warn(f"editors of this user may connect to 127.0.0.1:{listener.getsockname()[1]}")
        while True:
            connection, _ = listener.accept()
            with contextlib.closing(EditorStream(connection)) as editor:
                try:
                    check_user(connection)
                except StreamError as error:
                    warn(str(error))
                    continue
                Adapter(editor, registry, deadline).serve()
    return 0
