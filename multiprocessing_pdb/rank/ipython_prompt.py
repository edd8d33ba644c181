"""`interact` with IPython if it is installed: magics, `obj?` and tracebacks, on the variables of a frame."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "MPDB_IPYTHON"
_ABSENT = object()
_BUILTINS = ("__IPYTHON__", "display", "get_ipython")  # names that a shell adds permanently


def has_ipython() -> bool:
    """Return whether IPython is installed and enabled. MPDB_IPYTHON=0 selects Python's own interpreter."""
    return os.environ.get(VARIABLE) != "0" and importlib.util.find_spec("IPython") is not None


@contextmanager
def _unchanged_program() -> Iterator[None]:
    """Undo the effects of a new shell on the process, such as its replacement of __main__."""
    main = sys.modules.get("__main__")
    known = {name: getattr(builtins, name, _ABSENT) for name in _BUILTINS}
    try:
        yield
    finally:
        if main is not None:
            sys.modules["__main__"] = main
        for name, value in known.items():
            if value is not _ABSENT:
                setattr(builtins, name, value)
            elif hasattr(builtins, name):
                delattr(builtins, name)


def _make_shell(names: dict[str, Any]) -> Any:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):  # type: ignore[misc]
        """IPython shell that never uses a terminal and ends on `exit`."""

        is_over = False

        def ask_exit(self) -> None:
            """End the shell, for `exit` and `quit`."""
            self.is_over = True

    config = Config()
    config.HistoryManager.enabled = False  # no database and no thread in the program
    config.InteractiveShell.colors = "nocolor"
    return Shell(config=config, user_ns=names)  # instance() would return a notebook's own shell


def run_ipython(names: dict[str, Any]) -> None:
    """Run cells from sys.stdin and write their output to sys.stdout, until end of input or `exit`.

    Assignments change `names`, as in pdb's own `interact`, and not the frame.
    """
    with _unchanged_program():
        shell = _make_shell(names)
        shell.atexit_operations_done = True
        lines: list[str] = []
        while not shell.is_over:
            sys.stdout.write("   ...: " if lines else f"In [{shell.execution_count}]: ")
            sys.stdout.flush()
            line = sys.stdin.readline()
            if not line:
                break
            lines.append(line)
            status, _ = shell.input_transformer_manager.check_complete("".join(lines))
            if status == "incomplete" and line.strip():
                continue
            shell.run_cell("".join(lines), store_history=True)
            lines = []
        sys.stdout.write("\n")
