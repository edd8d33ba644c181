"""Requests that a stopped thread answers in its own frame: values, hashes, completions, stacks."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from multiprocessing_pdb.rank import tensors, variables
from multiprocessing_pdb.rank.expressions import compile_expression, evaluate
from multiprocessing_pdb.rank.pdb_loader import is_own_module
from multiprocessing_pdb.rank.reference import ReferenceRow, find_reference
from multiprocessing_pdb.rank.values import Value
from multiprocessing_pdb.wire.framing import Frame

_MOST_FRAMES = 200
_MOST_LEAVES = 1000  # in one answer, which must fit into a frame
_Answer = Callable[[Any, int, Frame], Frame]


class CancelledError(BaseException):
    """The console gave up waiting. Not an Exception: comparisons handle those of the program."""


class RequestHandler:
    """Answers the requests of consoles about one stopped thread.

    The value of a `diff`, or the rows of a `diff --golden`, are kept for the console that asked, for its
    follow-up requests. They are dropped at its next question, when the console disconnects, and when the
    thread continues.
    """

    def __init__(self) -> None:
        self._retained: dict[int, Value] = {}
        self._rows: dict[int, Sequence[ReferenceRow]] = {}
        self._cancelled: set[tuple[int, object]] = set()
        self._handlers: dict[str, _Answer] = {
            "evaluate": self._evaluate,
            "compare": self._compare,
            "rows": self._list_rows,
            "leaves": self._list_leaves,
            "hash": self._hash,
            "element": self._read_element,
            "complete": self._complete,
            "where": self._list_stack,
            "frames": self._list_frames,
            "variables": self._list_variables,
            "inspect": self._inspect,
        }

    def handles(self, do: object) -> bool:
        """Return whether `do` is a request that this handler answers."""
        return isinstance(do, str) and do in self._handlers

    def forget(self, connection: int | None = None) -> None:
        """Drop the values kept for one console, or for all."""
        if connection is None:
            self._retained.clear()
            self._rows.clear()
        else:
            self._retained.pop(connection, None)
            self._rows.pop(connection, None)

    def cancel(self, connection: int, number: object) -> None:
        """Cancel the comparison of a request, from another thread.

        The evaluation of an expression continues.
        """
        self._cancelled.add((connection, number))

    def answer(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        """Return the answer, or {"error"} with a message. Exceptions of user code do not propagate."""
        try:
            return self._handlers[frame["do"]](debugger, connection, frame)
        except BaseException as error:  # including SystemExit and KeyboardInterrupt of an expression
            return {"error": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            self._cancelled.discard((connection, frame.get("id")))

    def _make_check(self, connection: int, frame: Frame) -> tensors.Check:
        key = (connection, frame.get("id"))

        def check() -> None:
            if key in self._cancelled:
                raise CancelledError("the console's deadline has passed")

        return check

    def _evaluate(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        self.forget(connection)
        with _without_gradients():
            found = _evaluate_at(debugger, str(frame["text"]))
            value = self._retained[connection] = Value(found, self._make_check(connection, frame))
        return {"value": value.describe()}

    def _compare(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        """Compare a value, or all complete values without `text`, to the program's reference."""
        self.forget(connection)
        reference = find_reference()
        with _without_gradients():
            found = _evaluate_at(debugger, str(frame["text"])) if frame.get("text") else None
            if frame.get("text") and found is None:
                return {"error": f"{frame['text']} is None here"}
            rows = reference.compare(found, self._make_check(connection, frame))
        self._rows[connection] = rows
        return {"count": len(rows), "note": str(getattr(reference, "note", ""))}

    def _list_rows(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        begin = int(frame["begin"])
        return {"rows": [_describe_row(row) for row in self._rows[connection][begin : begin + _MOST_LEAVES]]}

    def _list_leaves(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        begin = int(frame["begin"])
        return {"leaves": self._retained[connection].list_leaves(begin, begin + _MOST_LEAVES)}

    def _hash(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        begin, end, parts = int(frame["begin"]), int(frame["end"]), int(frame["parts"])
        tensor = self._retained[connection].get_tensor(str(frame.get("path", "")))
        return {"hashes": tensors.hash_parts(tensor, begin, end, parts, self._make_check(connection, frame))}

    def _read_element(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        tensor = self._retained[connection].get_tensor(str(frame.get("path", "")))
        return {"element": tensors.read_element(tensor, int(frame["at"]))}

    def _complete(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        words = debugger.complete_words(
            str(frame["text"]), str(frame["line"]), int(frame["begin"]), int(frame["end"])
        )
        return {"words": words[:500]}

    def _list_stack(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        stack = []
        for at, line in debugger.stack[-_MOST_FRAMES:]:
            code = at.f_code
            if is_own_module(at.f_globals.get("__name__")):
                continue
            source = linecache.getline(code.co_filename, line, at.f_globals).strip()
            mark = ">" if at is debugger.curframe else " "
            stack.append(f"{mark} {code.co_filename}:{line} {code.co_name}: {source}")
        return {"stack": stack}

    def _list_frames(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        """Return the frames for an editor, innermost first. Later requests refer to a frame by `index`."""
        frames: list[Frame] = []
        for index, (at, line) in reversed(list(enumerate(debugger.stack))):
            if not is_own_module(at.f_globals.get("__name__")) and len(frames) < _MOST_FRAMES:
                code = at.f_code
                frames.append({"index": index, "file": code.co_filename, "line": line, "name": code.co_name})
        return {"frames": frames}

    def _list_variables(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        """Return the variables of a scope ("locals" or "globals"), or the children of the value of `text`."""
        index, text = int(frame["index"]), frame.get("text")
        if isinstance(text, str):
            found = variables.describe_children(text, variables.evaluate_in(debugger, index, text))
        else:
            names = variables.find_names(debugger, index)
            found = variables.describe_names(names[frame.get("scope") != "globals"])
        return {"variables": found}

    def _inspect(self, debugger: Any, connection: int, frame: Frame) -> Frame:
        """Return one value as a line of text."""
        text = str(frame["text"])
        return {
            "value": variables.describe(
                text, text, variables.evaluate_in(debugger, int(frame["index"]), text)
            )
        }


def _without_gradients() -> contextlib.AbstractContextManager[Any]:
    torch = sys.modules.get("torch")
    return torch.no_grad() if hasattr(torch, "no_grad") else contextlib.nullcontext()  # type: ignore[union-attr]


def _evaluate_at(debugger: Any, text: str) -> Any:
    code = compile_expression(text, "<console>")
    return evaluate(code, debugger.curframe.f_globals, debugger.frame_locals())


def _describe_row(row: ReferenceRow) -> Frame:
    """Return the fields for JSON, with non-finite numbers as text."""
    fields = dataclasses.asdict(row)
    return {
        name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
