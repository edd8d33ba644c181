"""The Pdb of a stopped rank: pdbpp or pdb, with commands from consoles instead of the terminal."""

from __future__ import annotations

import contextlib
import dis
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

from multiprocessing_pdb.rank.conditions import Condition, make_condition, parse_watch
from multiprocessing_pdb.rank.endpoint import write_stderr
from multiprocessing_pdb.rank.interruption import Interrupted
from multiprocessing_pdb.rank.ipython_prompt import has_ipython, run_ipython
from multiprocessing_pdb.rank.pdb_loader import is_own_module, load_pdb, without_readline
from multiprocessing_pdb.rank.streams import redirect_streams

if TYPE_CHECKING:
    from multiprocessing_pdb.rank.session import Session, Stop

# Attributes that pdb and pdbpp keep after a prompt, and the types of their initial values.
_LEFT_BY_A_PROMPT: dict[str, Callable[[], object]] = {
    "curframe_locals": dict,
    "_curframe_locals": dict,
    "fullstack": list,
    "_hidden_frames": list,
    "_via_set_trace_frame": type(None),
}
# All debuggers of a process share the breakpoints, since bdb keeps a single list of them per process.
_BREAKS: dict[str, list[int]] = {}


class ConsolePdb:
    """Mixin with the differences from an ordinary Pdb. It precedes Pdb in the bases.

    The types of pdb's attributes are Any, because the base class is chosen at run time.
    """

    session: Session
    stop: Stop
    is_nested = False  # stopped inside an expression that another prompt evaluates
    conditions: list[Condition]
    runs_free = False  # the last command resumed the program, and nothing will stop it again

    @property
    def breaks(self) -> dict[str, list[int]]:
        """The breakpoints of this process: file to lines."""
        return _BREAKS

    @breaks.setter
    def breaks(self, value: dict[str, list[int]]) -> None:
        # bdb assigns an empty dict in a new instance, which then loads all, and when all are cleared.
        _BREAKS.clear()
        _BREAKS.update(value)

    def is_skipped_module(self, name: str | None) -> bool:
        """Return whether steps skip a module: true for modules of the debugger."""
        return is_own_module(name)

    def start_tracing(self, frame: FrameType) -> None:
        """Stop at the next line of `frame`.

        A nested debugger traces only the frames of its expression. The frames below belong to the outer
        debugger.
        """
        # otherwise bdb stops in its own set_trace after a step over the line that led here
        sys.settrace(None)
        floor = self.session.command_frame if self.is_nested else None
        outer, at = [], floor
        while at is not None:
            outer.append((at, at.f_trace))
            at = at.f_back
        self.set_trace(frame)  # type: ignore[attr-defined]
        if floor is None:
            return
        for known, trace in outer:
            known.f_trace = trace
        bottom, at = frame, frame
        while at is not None and at is not floor:
            bottom = bottom if is_own_module(at.f_globals.get("__name__")) else at
            at = at.f_back
        self.botframe = bottom

    def stop_now(self, frame: FrameType) -> None:
        """Stop in `frame` at its current line. For a breakpoint that was hit outside of bdb's tracing."""
        self.start_tracing(frame)
        sys.settrace(None)
        with self._guard():
            self.interaction(frame, None)
        if self.runs_free:
            return
        if self.stopframe is frame and _is_returning(frame):  # type: ignore[attr-defined]
            self._set_stopinfo(None, None)  # type: ignore[attr-defined]  # same as bdb after a return event
        sys.settrace(self.trace_dispatch)  # type: ignore[attr-defined]

    # Called by bdb when the program reaches a place to stop at.

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Prevent stops inside a stop, which confuse bdb, and keep errors of pdb from the program."""
        accepts, self.session.accepts_stops = self.session.accepts_stops, False
        try:
            yield
        except BdbQuit:
            raise
        except Exception as error:
            write_stderr(f"the debugger failed ({type(error).__name__}: {error}); the program runs on")
            self._run_free()
        finally:
            self.session.accepts_stops = accepts

    def _run_free(self) -> None:
        self.set_continue()
        self.runs_free = True
        sys.settrace(None)

    def user_call(self, frame: FrameType, arguments: Any) -> None:
        """Stop at a function call."""
        with self._guard():
            super().user_call(frame, arguments)  # type: ignore[misc]

    def user_line(self, frame: FrameType) -> None:
        """Stop at a line."""
        with self._guard():
            super().user_line(frame)  # type: ignore[misc]

    def user_return(self, frame: FrameType, value: Any) -> None:
        """Stop at a return."""
        with self._guard():
            super().user_return(frame, value)  # type: ignore[misc]

    def user_exception(self, frame: FrameType, error: Any) -> None:
        """Stop at an exception."""
        with self._guard():
            super().user_exception(frame, error)  # type: ignore[misc]

    def break_here(self, frame: FrameType) -> bool:
        """Return whether a breakpoint or condition applies.

        A Tra() inside their expressions does not stop.
        """
        accepts, self.session.accepts_stops = self.session.accepts_stops, False
        try:
            return bool(super().break_here(frame)) or self._meets_condition(frame)  # type: ignore[misc]
        finally:
            self.session.accepts_stops = accepts

    def break_anywhere(self, frame: FrameType) -> bool:
        """Return whether anything may stop in the function of `frame`."""
        watched = any(condition.code is frame.f_code for condition in self.conditions)
        return watched or bool(super().break_anywhere(frame))  # type: ignore[misc]

    def _meets_condition(self, frame: FrameType) -> bool:
        for condition in self.conditions:
            if condition.code is not frame.f_code:
                continue
            reason = condition.check(frame.f_globals, frame.f_locals)
            if reason:
                self.stop = replace(self.stop, reason=reason)
                self.currentbp = 0  # bdb's attribute: do not run the commands of a breakpoint
                if condition.is_once:
                    self.conditions.remove(condition)
                return True
        return False

    def interaction(self, *arguments: Any) -> None:
        """Stop at a prompt. Every kind of stop calls this."""
        with self._guard():
            super().interaction(*arguments)  # type: ignore[misc]

    def _cmdloop(self) -> None:
        # Every prompt calls this. pdb swallows KeyboardInterrupt. Here, Ctrl-C in the program's own
        # terminal must still end the program.
        if sys.is_finalizing() or not self.session.enter(self):
            self._run_free()
            return
        try:
            self.cmdloop()  # type: ignore[attr-defined]
        except BaseException:
            self.runs_free = True  # Python ends tracing when a trace function raises
            raise
        finally:
            self.session.leave(self)

    def onecmd(self, line: str) -> Any:
        """Run one command with tracing enabled, so that a Tra() inside it can stop."""
        session = self.session
        outer, session.command_frame = session.command_frame, sys._getframe()
        session.accepts_stops = True
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return session.interruption.call(sys.call_tracing, self._run_command, (line,))
        except Interrupted:
            self.message("--KeyboardInterrupt--")  # type: ignore[attr-defined]
            return None
        finally:
            session.accepts_stops = False
            session.command_frame = outer
            if not self.runs_free:
                sys.settrace(trace)

    def _run_command(self, line: str) -> Any:
        try:
            return super().onecmd(line)  # type: ignore[misc]
        finally:
            # A step out of an expression that stopped would continue into the code that ends the command. A
            # post-mortem prompt is not inside a trace function, where Python traces nothing.
            sys.settrace(None)

    def set_continue(self) -> None:
        """Continue, and end the session unless a breakpoint can stop this thread again."""
        if self.conditions:  # bdb would end tracing without breakpoints
            self._set_stopinfo(self.botframe, None, -1)  # type: ignore[attr-defined]
            self.runs_free = False
            return
        super().set_continue()  # type: ignore[misc]
        self.runs_free = not self.breaks

    def set_quit(self) -> None:
        """Abandon the nested expression."""
        super().set_quit()  # type: ignore[misc]
        self.runs_free = True

    # Additional commands, at every prompt.

    def do_watch(self, argument: str) -> None:
        """Watch EXPR changes|nan|inf: stop at the line of this function after which it holds. watch: list."""
        if not argument:
            self.message("\n".join(f"{n} {c}" for n, c in enumerate(self.conditions)) or "nothing is watched")  # type: ignore[attr-defined]
            return
        try:
            condition = parse_watch(argument, self.curframe.f_code, self._list_names())  # type: ignore[attr-defined]
        except (ValueError, SyntaxError) as error:
            self.error(str(error))  # type: ignore[attr-defined]
            return
        # Record the initial value.
        condition.check(self.curframe.f_globals, self.frame_locals())  # type: ignore[attr-defined]
        self.conditions.append(condition)
        caveat = f", but {condition.caveat}" if condition.caveat else ""
        self.message(f"{condition}{caveat}")  # type: ignore[attr-defined]

    def _list_names(self) -> dict[str, Any]:
        return {**self.curframe.f_globals, **self.frame_locals()}  # type: ignore[attr-defined]

    def do_unwatch(self, argument: str) -> None:
        """Unwatch [N]: forget a watched expression, or all."""
        if not argument:
            self.conditions.clear()
        elif argument.isdecimal() and int(argument) < len(self.conditions):
            del self.conditions[int(argument)]
        else:
            self.error(f"no watched expression {argument}; watch lists them")  # type: ignore[attr-defined]

    def do_until(self, argument: str) -> Any:
        """Until [LINE]: as in pdb. until EXPR: run until it is true at a line of this function."""
        if not argument or argument.strip().isdecimal():
            return super().do_until(argument)  # type: ignore[misc]
        try:
            code = self.curframe.f_code  # type: ignore[attr-defined]
            self.conditions.append(make_condition(argument, "true", code, self._list_names()))
        except (ValueError, SyntaxError) as error:
            self.error(str(error))  # type: ignore[attr-defined]
            return None
        self.set_continue()
        return 1

    do_unt = do_until

    # Commands that would use the program's terminal or end the program.

    def _custom_completer(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # pdbpp would import readline

    def get_terminal_size(self) -> tuple[int, int]:
        """Return the columns and lines of the console's terminal."""
        return self.session.terminal_size

    def do_quit(self, argument: str) -> Any:
        """Abandon a nested stop; otherwise the console decides whether the rank goes on."""
        if self.is_nested:
            return super().do_quit(argument)  # type: ignore[misc]
        self.message("*** the console decides: detach, c, or kill; this rank stays stopped")  # type: ignore[attr-defined]
        return None

    do_q = do_exit = do_run = do_restart = do_quit
    do_EOF = do_quit  # noqa: N815  # pdb's name

    def _refuse_editor(self, argument: str) -> None:
        self.message("*** an editor here would take the program's terminal")  # type: ignore[attr-defined]

    do_edit = do_ed = do_put = do_paste = _refuse_editor

    def do_clear(self, argument: str) -> Any:
        """Clear breakpoints; the confirmation is asked in the console."""
        with redirect_streams(self.session.stdin, self.session.stdout):
            return super().do_clear(argument)  # type: ignore[misc]

    do_cl = do_clear

    def do_interact(self, argument: str) -> Any:
        """Start IPython, or else Python's interpreter, in the console; end of input leaves it."""
        with redirect_streams(self.session.stdin, self.session.stdout), without_readline():
            if has_ipython():
                run_ipython({**self.curframe.f_globals, **self.frame_locals()})  # type: ignore[attr-defined]
                return None
            return super().do_interact(argument)  # type: ignore[misc]

    def do_debug(self, argument: str) -> None:
        """Debug code: step through a statement in a nested debugger."""
        frame, names = self.curframe, self.frame_locals()  # type: ignore[attr-defined]
        nested = make_debugger(self.session, outer=self)
        self.message("ENTERING RECURSIVE DEBUGGER")  # type: ignore[attr-defined]
        try:
            nested.run(argument, frame.f_globals, names)
        except Exception as error:
            self.error("".join(traceback.format_exception_only(error)).strip())  # type: ignore[attr-defined]
        self.message("LEAVING RECURSIVE DEBUGGER")  # type: ignore[attr-defined]

    # Called by the request handler.

    def frame_locals(self) -> Any:
        """Return the locals of the current frame, including assignments at the prompt.

        Before Python 3.13, another access to f_locals would undo the assignments.
        """
        if sys.version_info >= (3, 13):
            return self.curframe.f_locals  # type: ignore[attr-defined]
        return self.curframe_locals  # type: ignore[attr-defined]

    def release(self) -> None:
        """Drop references to the frames and values of the last prompt.

        Otherwise pdb would keep objects of the program alive, such as tensors in GPU memory.
        """
        held = vars(self)
        held.update({name: empty() for name, empty in _LEFT_BY_A_PROMPT.items() if name in held})
        for displays in (held.get(name, {}) for name in ("displaying", "display_list")):
            for frame in [frame for frame, shown in displays.items() if not shown]:
                del displays[frame]

    def complete_words(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Return the completions of `text`, found by pdb's own completion without readline."""
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
        """Turn the colors of pdbpp or Python 3.14 on or off. Older versions of pdb have none."""
        config = getattr(self, "config", None)
        if config is not None:
            config.highlight = colors
            config.use_pygments = None if colors else False
        elif hasattr(self, "colorize"):  # Python 3.14
            self.colorize = colors


def _is_returning(frame: FrameType) -> bool:
    """Return whether a frame has no further line: the stop was called by a profile function at its return."""
    at = frame.f_lasti
    return at >= 0 and dis.opname[frame.f_code.co_code[at]].startswith("RETURN_")


@cache
def _load_class() -> type:
    base: Any = load_pdb().Pdb
    made: type = type(base)("RankPdb", (ConsolePdb, base), {})
    return made


def make_debugger(session: Session, outer: Any = None) -> Any:
    """Return a debugger with the session's input and output, nested if `outer` is given."""
    parent = _load_class()
    bound = type(parent)("RankPdb", (parent,), {"session": session, "is_nested": outer is not None})
    with without_readline():
        # Inside a function named set_trace, pdbpp's metaclass returns an old instance of the thread.
        debugger = type.__call__(bound, stdin=session.stdin, stdout=session.stdout, nosigint=True)
    debugger.conditions = []
    debugger.use_rawinput = 0
    debugger.skip = {"multiprocessing_pdb"}  # not empty, so that bdb calls is_skipped_module
    debugger.paint(False)
    if outer is not None:
        debugger.stop = outer.stop
        debugger.prompt = f"({outer.prompt.strip()}) "
    return debugger
