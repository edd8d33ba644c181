"""`attach R`: an interactive pdb session with one rank. The rank stays stopped however the session ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from multiprocessing_pdb.console.broadcast import Answer, ask, collect
from multiprocessing_pdb.console.grouping import name_ranks
from multiprocessing_pdb.console.link import LinkClosedError, wait
from multiprocessing_pdb.console.target import Target, read_number, read_text
from multiprocessing_pdb.console.terminal import Terminal, find_size
from multiprocessing_pdb.wire.procfs import is_alive

_COMPLETION_SECONDS = 1.0
_POLL_SECONDS = 0.1
_LEAVING = ("q", "quit", "exit")


class Attachment:
    """One interactive session.

    `find_next_stop` finds the rank's next stop. `ask_quit` asks how to interpret `q`.
    """

    def __init__(
        self,
        terminal: Terminal,
        target: Target,
        find_next_stop: Callable[[Target], Target | None],
        ask_quit: Callable[[], bool],
    ) -> None:
        self._terminal = terminal
        self._target = target
        self._find_again = find_next_stop
        self._ask_quit = ask_quit
        self._last = ""

    def run(self) -> None:
        """Interact with the rank until the user detaches or the rank is gone."""
        if not self._greet():
            return
        while True:
            nested = self._target.info.get("nested") is True
            try:
                line = self._terminal.read(f"[{self._target.label}] {self._prompt()}", self._complete)
            except EOFError:
                self._record("EOF" if nested else "detach", nested)
                if nested and self._send({"do": "eof", "nested": True}):
                    continue
                self._terminal.show("")
                break
            except KeyboardInterrupt:
                self._terminal.show("")
                continue
            word = line.strip()
            self._record(word, nested)
            if not nested and word == "detach":
                break
            if not nested and word in _LEAVING:
                if self._ask_quit():
                    break
                continue
            frame = {
                "do": "line",
                "text": line,
                "nested": nested,
                "colors": self._terminal.has_colors,
                "size": list(find_size()),
            }
            if not self._send(frame) and not self._await_next_stop():
                return
        self._detach()

    def _record(self, word: str, nested: bool) -> None:
        """Record a line as a command for this rank only, which a replay can run without attaching."""
        if not nested and word in ("detach", *_LEAVING):
            self._terminal.record(word)
            return
        if not nested:  # an empty line repeats the previous one, as in pdb
            word = self._last = word or self._last
        if word:
            self._terminal.record(f"@{self._target.label} {word}")

    def _show(self, output: str) -> None:
        self._terminal.show_part(output, is_prompt=True)

    def _prompt(self) -> str:
        return read_text(self._target.info, "prompt") or "(Pdb) "

    def _greet(self) -> bool:
        (answer,) = ask([self._target], {"do": "attach"}, 5.0)
        name = name_ranks([self._target])
        if answer.failure:
            self._terminal.show(f"{name}: {answer.failure}")
            return False
        others = int(read_number(answer.frame, "attached") or 1) - 1
        if others > 0:
            self._terminal.show(f"{others} other console(s) are attached to {name}; lines are taken in turn")
        if self._target.state == "running":
            self._terminal.show(f"{name} runs; a step or a breakpoint stops it, Ctrl-C asks it to stop")
            return self._await_prompt()
        self._show(read_text(answer.frame, "banner"))
        return True

    def _await_prompt(self) -> bool:
        while True:
            try:
                (answer,) = ask([self._target], {"do": "status"}, 5.0)
                if answer.failure:
                    self._terminal.show(f"{name_ranks([self._target])}: {answer.failure}")
                    return False
                if self._target.state != "running":
                    return True
                time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                if not self._interrupt():
                    return False

    def _interrupt(self) -> bool:
        """Interrupt the rank. A second Ctrl-C before it reacts gives up."""
        try:
            (answer,) = ask([self._target], {"do": "interrupt"}, 5.0)
        except KeyboardInterrupt:
            return False
        if read_text(answer.frame, "interrupted") == "running":
            self._terminal.show(
                "asked to stop at the next line; a call into C has to end first. Ctrl-C again leaves"
            )
        return not answer.failure

    def _send(self, frame: dict[str, object]) -> bool:
        """Send a line and show its output; return whether the rank is at a prompt again."""
        target, answer = self._target, Answer(self._target)
        try:
            number = target.ask(frame)
            pressed = 0.0
            while True:
                try:
                    if collect(answer, number, lambda _, text: self._show(text)):
                        break
                    wait([target.link.channel], 1.0)
                except KeyboardInterrupt:
                    again, pressed = time.monotonic() - pressed < 3.0, time.monotonic()
                    if again or not self._interrupt():
                        target.give_up(number, str(frame.get("text")))
                        self._terminal.show(f"{name_ranks([target])} is left as it is")
                        return False
        except LinkClosedError:
            answer.failure = f"gone: {target.link.explain_close()}"
        self._show(read_text(answer.frame, "out"))
        if answer.failure:
            self._terminal.show(f"{name_ranks([target])}: {answer.failure}")
        return read_text(answer.frame, "end") == "ready" or (bool(answer.failure) and not target.link.closed)

    def _await_next_stop(self) -> bool:
        """Wait for the next stop and return True, or False if the rank is gone or the user gives up."""
        name = name_ranks([self._target])
        if not self._terminal.is_interactive:
            self._terminal.show(f"{name} runs on")
            return False
        self._terminal.show(f"{name} runs on; waiting for its next stop, Ctrl-C goes back to the console")
        try:
            while True:
                again = self._find_again(self._target)
                if again is not None:
                    self._target = again
                    return self._greet()
                if self._has_exited():
                    self._terminal.show(f"{name} has exited")
                    return False
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            self._terminal.show("")
            return False

    def _has_exited(self) -> bool:
        pid = read_number(self._target.info, "pid")
        here = read_text(self._target.info, "host") == os.uname().nodename
        start = read_number(self._target.info, "start")
        return here and pid is not None and start is not None and not is_alive(int(pid), int(start))

    def _complete(self, text: str, line: str, begin: int, end: int) -> list[str]:
        request = {"do": "complete", "text": text, "line": line, "begin": begin, "end": end}
        (answer,) = ask([self._target], request, _COMPLETION_SECONDS)
        words = answer.frame.get("words")
        return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []

    def _detach(self) -> None:
        (answer,) = ask([self._target], {"do": "detach"}, 2.0)
        name = name_ranks([self._target])
        self._terminal.show(
            f"{name}: {answer.failure}" if answer.failure else f"detached; {name} stays stopped"
        )
