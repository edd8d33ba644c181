"""The Pdb of a stopped rank: pdbpp if it is installed, else pdb, kept away from the program's streams."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from multiprocessing_pdb.rank.streams import lent

if TYPE_CHECKING:
    from multiprocessing_pdb.rank.session import Session

VARIABLE = "MPDB_PDB"
_MISSING = object()


@contextmanager
def without_readline() -> Iterator[None]:
    """Make `import readline` fail meanwhile: in the background it can deadlock (pytorch #171818)."""
    known = sys.modules.get("readline", _MISSING)
    if known is _MISSING:
        sys.modules["readline"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if known is _MISSING and sys.modules.get("readline", _MISSING) is None:
            del sys.modules["readline"]


def _load_plain() -> ModuleType:
    """Return the standard library's pdb even where pdbpp has put itself in its place."""
    path = Path(sysconfig.get_path("stdlib")) / "pdb.py"
    spec = importlib.util.spec_from_file_location("_multiprocessing_pdb_plain", path)
    if spec is None or spec.loader is None:
        import pdb

        return pdb
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_pdb() -> ModuleType:
    """Return pdbpp if it can be imported, else pdb; MPDB_PDB=pdb asks for the plain one."""
    with without_readline():
        if os.environ.get(VARIABLE) == "pdb":
            return _load_plain()
        try:
            import pdbpp
        except Exception:  # a pdbpp that does not fit this Python must not cost the stop
            return _load_plain()
        # pdbpp sets these in the importing thread only, and reads them in every thread.
        for name, value in (("GLOBAL_PDB", None), ("_pdbpp_completing", False), ("_pdbpp_in_init", False)):
            if not hasattr(pdbpp.local, name):
                setattr(pdbpp.local, name, value)
        return pdbpp  # type: ignore[no-any-return]


class Remote:
    """What differs from an ordinary Pdb; mixed in before it."""

    session: Session

    def interaction(self, *arguments: Any) -> None:
        """Let consoles in for as long as the prompt is there."""
        if self.session.nesting:  # the prompt of a `debug` command, inside ours
            super().interaction(*arguments)  # type: ignore[misc]
            return
        self.session.enter(self)
        try:
            super().interaction(*arguments)  # type: ignore[misc]
        finally:
            self.session.leave()

    def _cmdloop(self) -> None:
        # pdb swallows KeyboardInterrupt here; Ctrl-C in the program's terminal must go on ending the program.
        self.cmdloop()  # type: ignore[attr-defined]

    def _custom_completer(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # pdbpp would import readline

    def set_continue(self) -> None:
        """Run on, and close the endpoint unless a breakpoint can stop this thread again."""
        super().set_continue()  # type: ignore[misc]
        if not self.session.nesting:
            self.session.runs_free = not self.breaks  # type: ignore[attr-defined]

    def _refuse(self, argument: str) -> None:
        self.message("*** the console decides: detach, c, or kill; this rank stays stopped")  # type: ignore[attr-defined]

    do_quit = do_q = do_exit = do_run = do_restart = _refuse
    do_EOF = _refuse  # noqa: N815  # pdb's name

    def _refuse_editor(self, argument: str) -> None:
        self.message("*** an editor here would take the program's terminal")  # type: ignore[attr-defined]

    do_edit = do_ed = do_put = do_paste = _refuse_editor

    def do_clear(self, argument: str) -> Any:
        """Clear breakpoints; the confirmation is asked in the console."""
        with lent(self.session.stdin, self.session.stdout):
            return super().do_clear(argument)  # type: ignore[misc]

    do_cl = do_clear

    def do_interact(self, argument: str) -> Any:
        """Start an interactive interpreter in the console; end of input leaves it."""
        with lent(self.session.stdin, self.session.stdout), without_readline():
            return super().do_interact(argument)  # type: ignore[misc]

    def do_debug(self, argument: str) -> Any:
        """Debug an expression in a nested debugger."""
        self.session.nesting += 1
        try:
            with without_readline():  # plain pdb constructs another Pdb
                return super().do_debug(argument)  # type: ignore[misc]
        finally:
            self.session.nesting -= 1

    def complete_words(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Return what may stand for `text`, as pdb's own completion finds it, without readline."""
        margin = len(line) - len(line.lstrip())
        line, begin, end = line.lstrip(), begin - margin, end - margin
        expression = self._complete_expression  # type: ignore[attr-defined]
        if begin > 0:
            command, _, _ = self.parseline(line)  # type: ignore[attr-defined]
            finders = [getattr(self, f"complete_{command}", None) or expression]
        else:
            finders = [self.completenames, expression]  # type: ignore[attr-defined]
        with without_readline():
            words = {str(word) for find in finders for word in find(text, line, begin, end) or []}
        return sorted(words)

    def paint(self, colors: bool) -> None:
        """Turn pdbpp's colours on or off; pdb has none."""
        config = getattr(self, "config", None)
        if config is not None:
            config.highlight = colors
            config.use_pygments = None if colors else False
        elif hasattr(self, "colorize"):  # Python 3.14
            self.colorize = colors


@cache
def _load_class() -> type:
    base: Any = load_pdb().Pdb
    made: type = type(base)("RankPdb", (Remote, base), {})
    return made


def make_debugger(session: Session) -> Any:
    """Return a debugger whose commands and answers are the session's."""
    parent = _load_class()
    bound = type(parent)("RankPdb", (parent,), {"session": session})
    with without_readline():
        # pdbpp's metaclass hands out a thread's old instance inside a function called set_trace.
        debugger = type.__call__(bound, stdin=session.stdin, stdout=session.stdout, nosigint=True)
    debugger.use_rawinput = 0
    debugger.paint(False)
    return debugger
