"""The adapter: forwards an editor's requests about threads, frames and variables to the ranks."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multiprocessing_pdb.console.broadcast import ask
from multiprocessing_pdb.console.commands import STEPS
from multiprocessing_pdb.console.dap.breakpoints import Breakpoints
from multiprocessing_pdb.console.dap.stream import EditorStream, Message, StreamError
from multiprocessing_pdb.console.dap.threads import RankThread, RankThreads
from multiprocessing_pdb.console.link import LinkClosedError
from multiprocessing_pdb.console.registry import JobError, RankRegistry
from multiprocessing_pdb.console.target import read_text
from multiprocessing_pdb.wire.framing import Frame

_LOOK_SECONDS = 0.2  # interval of the search for newly stopped ranks
_MOST_FRAMES = 1000  # per rank; a frame's id is its thread's id times this, plus its index
_CAPABILITIES = {"supportsConfigurationDoneRequest": True, "supportsConditionalBreakpoints": True}
_STEPS = {word for word, name in STEPS.items() if "watch" not in name}


class RequestError(ValueError):
    """A request that failed. The editor shows the message."""


class Adapter:
    """One editor's session. It steps ranks individually, and leaves them unchanged when it ends."""

    def __init__(self, editor: EditorStream, registry: RankRegistry, deadline: float) -> None:
        self._editor = editor
        self._deadline = deadline
        self._threads = RankThreads(registry)
        self._breakpoints = Breakpoints(deadline)
        self._is_attached = self._is_over = False
        # variablesReference is the index in this list plus 1
        self._opened: list[tuple[int, int, dict[str, str]]] = []
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "initialize": lambda arguments: dict(_CAPABILITIES),
            "attach": self._attach,
            "configurationDone": lambda arguments: {},
            "setBreakpoints": self._set_breakpoints,
            "setExceptionBreakpoints": lambda arguments: {},
            "threads": self._list_threads,
            "stackTrace": self._list_frames,
            "scopes": self._list_scopes,
            "variables": self._list_variables,
            "evaluate": self._evaluate,
            "continue": lambda arguments: self._go("continue", arguments),
            "next": lambda arguments: self._go("next", arguments),
            "stepIn": lambda arguments: self._go("step", arguments),
            "stepOut": lambda arguments: self._go("return", arguments),
            "pause": self._pause,
            "disconnect": self._disconnect,
        }

    def serve(self) -> None:
        """Serve until the editor disconnects."""
        try:
            while not self._is_over:
                readable, _, _ = select.select([self._editor], [], [], _LOOK_SECONDS)
                for message in self._editor.receive() if readable else []:
                    self._answer(message)
                if self._is_attached and not self._is_over:
                    self._look()
        except StreamError:
            pass
        finally:
            self._breakpoints.clear(self._threads)

    def _answer(self, message: Message) -> None:
        command, arguments = str(message.get("command")), message.get("arguments")
        answer: Message = {"type": "response", "request_seq": message.get("seq"), "command": command}
        try:
            handler = self._handlers.get(command)
            if handler is None:
                raise RequestError(f"the request {str(command)[:40]} is not supported")
            body = handler(arguments if isinstance(arguments, dict) else {})
            self._editor.send({**answer, "success": True, "body": body})
        except (
            RequestError,
            JobError,
            LinkClosedError,
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
        ) as error:
            what = error.args[0] if isinstance(error, RequestError | JobError) else repr(error)
            self._editor.send({**answer, "success": False, "message": str(what)})
        if command == "initialize":
            self._editor.send_event("initialized", {})

    def _look(self) -> None:
        """Notify the editor of ranks that have stopped, continued or ended since the last call."""
        for thread in list(self._threads):
            came_to = thread.follow()
            if came_to == "gone":
                self._tell_continued(thread)
        with contextlib.suppress(JobError):
            for thread in self._threads.refresh():
                self._editor.send_event("thread", {"reason": "exited", "threadId": thread.id})
        for thread in list(self._threads):
            if thread.is_stopped and not thread.is_announced:
                self._breakpoints.give(thread)
                self._editor.send_event("stopped", self._describe_stop(thread))
                thread.is_announced = True

    def _describe_stop(self, thread: RankThread) -> Message:
        why = read_text(thread.target.info, "reason")
        body: Message = {"threadId": thread.id, "allThreadsStopped": False}
        if thread.why:
            return {**body, "reason": thread.why}
        # It stopped on its own: at a Tra(), with its reason, or at a breakpoint that was set while it ran.
        return {**body, "reason": "breakpoint" if why.startswith("break ") else "pause", "description": why}

    def _tell_continued(self, thread: RankThread) -> None:
        self._editor.send_event("continued", {"threadId": thread.id, "allThreadsContinued": False})

    def _ask(self, number: object, request: Frame) -> Frame:
        """Return a stopped rank's answer. Raises RequestError, also if the rank runs or is too slow."""
        thread = self._threads.get(number)
        if not thread.is_stopped:
            raise RequestError(f"{thread.name} runs")
        (answer,) = ask([thread.target], request, self._deadline)
        if answer.failure:
            raise RequestError(answer.failure)
        return {**answer.frame, "out": answer.out}

    # Request handlers, named after the protocol's requests.

    def _attach(self, arguments: Message) -> Message:
        self._threads.refresh()
        self._is_attached = True
        return {}

    def _set_breakpoints(self, arguments: Message) -> Message:
        path = str(arguments["source"].get("path") or "")
        wanted = {int(b["line"]): str(b.get("condition") or "") for b in arguments.get("breakpoints") or []}
        problems = self._breakpoints.replace(path, wanted, self._threads)
        shown: list[Message] = []
        for line in wanted:
            problem = problems.get(line)
            shown.append({"line": line, "verified": not problem, **({"message": problem} if problem else {})})
        return {"breakpoints": shown}

    def _list_threads(self, arguments: Message) -> Message:
        return {"threads": [{"id": thread.id, "name": thread.name} for thread in self._threads]}

    def _list_frames(self, arguments: Message) -> Message:
        number = int(arguments["threadId"])
        frames: list[Message] = []
        for frame in _read_list(self._ask(number, {"do": "frames"}), "frames")[:_MOST_FRAMES]:
            file = read_text(frame, "file")
            source = {} if file.startswith("<") else {"source": {"name": Path(file).name, "path": file}}
            at = {"id": number * _MOST_FRAMES + int(frame["index"]), "line": int(frame["line"]), "column": 1}
            frames.append({**at, "name": read_text(frame, "name"), **source})
        begin = int(arguments.get("startFrame") or 0)
        end = begin + (int(arguments.get("levels") or 0) or len(frames))
        return {"stackFrames": frames[begin:end], "totalFrames": len(frames)}

    def _list_scopes(self, arguments: Message) -> Message:
        number, index = divmod(int(arguments["frameId"]), _MOST_FRAMES)
        self._threads.get(number)
        return {
            "scopes": [
                {
                    "name": scope.capitalize(),
                    "presentationHint": scope,
                    "variablesReference": self._open(number, index, {"scope": scope}),
                    "expensive": scope == "globals",
                }
                for scope in ("locals", "globals")
            ]
        }

    def _open(self, number: int, index: int, what: dict[str, str]) -> int:
        self._opened.append((number, index, what))
        return len(self._opened)

    def _list_variables(self, arguments: Message) -> Message:
        at = int(arguments["variablesReference"]) - 1
        if not 0 <= at < len(self._opened):
            raise RequestError("these variables are not known")
        number, index, what = self._opened[at]
        found = _read_list(self._ask(number, {"do": "variables", "index": index, **what}), "variables")
        return {"variables": [self._show(number, index, variable) for variable in found]}

    def _show(self, number: int, index: int, variable: Frame) -> Message:
        text = read_text(variable, "text")
        has_children = variable.get("has_children") is True
        return {
            "name": read_text(variable, "name"),
            "value": read_text(variable, "value"),
            "type": read_text(variable, "type"),
            "evaluateName": text,
            "variablesReference": self._open(number, index, {"text": text}) if has_children else 0,
        }

    def _evaluate(self, arguments: Message) -> Message:
        """Run input of the editor's console as a line of the prompt. Other expressions are only inspected."""
        text = str(arguments["expression"])
        if "frameId" not in arguments:
            raise RequestError("choose a rank's frame first: an expression is evaluated in one")
        number, index = divmod(int(arguments["frameId"]), _MOST_FRAMES)
        if arguments.get("context") == "repl" and text.strip() in _STEPS:
            self._go(text.strip(), {"threadId": number})
            self._tell_continued(self._threads.get(number))
            return {"result": "", "variablesReference": 0}
        if arguments.get("context") == "repl":
            answer = self._ask(number, {"do": "line", "text": text})
            return {"result": answer["out"].rstrip("\n"), "variablesReference": 0}
        value = self._ask(number, {"do": "inspect", "index": index, "text": text}).get("value")
        shown = self._show(number, index, value if isinstance(value, dict) else {})
        return {
            "result": shown["value"],
            "type": shown["type"],
            "variablesReference": shown["variablesReference"],
        }

    def _go(self, line: str, arguments: Message) -> Message:
        thread = self._threads.get(arguments["threadId"])
        if not thread.is_stopped:
            raise RequestError(f"{thread.name} runs")
        thread.go(line)
        return {"allThreadsContinued": False} if line == "continue" else {}

    def _pause(self, arguments: Message) -> Message:
        answer = self._threads.get(arguments["threadId"]).pause()
        if "error" in answer:
            raise RequestError(read_text(answer, "error"))
        return {}

    def _disconnect(self, arguments: Message) -> Message:
        self._is_over = True
        return {}


def _read_list(frame: Frame, name: str) -> list[dict[str, Any]]:
    value = frame.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
