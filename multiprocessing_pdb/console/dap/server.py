"""`python -m multiprocessing_pdb --dap PORT`: serves editors one after another, until interrupted."""

from __future__ import annotations

import contextlib
import sys

from multiprocessing_pdb.console.dap.adapter import Adapter
from multiprocessing_pdb.console.dap.stream import EditorStream, StreamError, check_user, listen
from multiprocessing_pdb.console.registry import RankRegistry


def _report(text: str) -> None:
    print(f"multiprocessing_pdb: {text}", file=sys.stderr, flush=True)


def serve_editors(registry: RankRegistry, port: int, deadline: float) -> int:
    """Serve editors. Return the exit code: 0 when interrupted, 2 if the port is unusable."""
    try:
        listener = listen(port)
    except (OSError, OverflowError) as error:
        _report(f"--dap {port}: {error}; choose a port that is free, or 0 for any")
        return 2
    with listener, contextlib.suppress(KeyboardInterrupt):
        _report(f"editors of this user may connect to 127.0.0.1:{listener.getsockname()[1]}")
        while True:
            connection, _ = listener.accept()
            with contextlib.closing(EditorStream(connection)) as editor:
                try:
                    check_user(connection)
                except StreamError as error:
                    _report(str(error))
                    continue
                Adapter(editor, registry, deadline).serve()
    return 0
