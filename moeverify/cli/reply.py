"""The answer of a command in JSON, written when it ends, after an error too."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moeverify.errors import CaseError, FormatError, MachineError, Problem, read_message

if TYPE_CHECKING:
    from moeverify.results.answer import CommandAnswer, CommandFacts, Status

_STATUS: dict[int, Status] = {0: "pass", 1: "mismatch", 2: "bad-input", 3: "error", 4: "undecided"}
_BRIEF_LIMITS = ((4, 300), (1, 200), (1, 0))  # problems, and characters of each of their texts


@dataclass
class Reply:
    """The JSON that a command owes: the file of `--json`, and with `--json-brief` a JSON text on standard output.

    A command sets `facts` and `next`, as (command, purpose), which become a `CommandAnswer`. A command with a
    `document` of its own has it written instead, and a `CommandAnswer` if it ended before. One that has written the
    file itself sets `file` to None, and `is_brief` to False after its short JSON. `is_format` means that it
    checks the file itself, with those of its other formats.
    """

    command: str = ""
    file: Path | None = None
    is_brief: bool = False
    is_format: bool = False
    facts: CommandFacts | None = None
    next: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    document: str = ""

    def advise(self, words: Sequence[object], purpose: str) -> None:
        """Add a command line of moeverify to `next`."""
        self.next.append((shlex.join(["moeverify", *map(str, words)]), purpose))

    def check(self) -> None:
        """Raises: CaseError if the file cannot be written."""
        from moeverify.report.files import check_writable

        if self.file is not None and not self.is_format:
            try:
                check_writable([self.file])
            except CaseError:
                self.file = None
                raise

    def write(self, code: int, error: BaseException | None) -> None:
        """Write the answer of a command that ends with an exit code, because of an error if there is one.

        Standard output gets an answer only where the short JSON of a run is missing because of an error.

        Raises: OSError when writing fails.
        """
        if self.file is not None:
            from moeverify.report.files import write_atomically

            text = self.document or self._answer(code, error).model_dump_json(indent=2) + "\n"
            write_atomically(self.file, text)
        if self.is_brief and code:
            typer.echo(_format_brief(self._answer(code, error)))

    def _answer(self, code: int, error: BaseException | None) -> CommandAnswer:
        from moeverify.results.answer import CommandAnswer
        from moeverify.results.brief import NextStep

        return CommandAnswer(
            command=self.command,
            status=_STATUS.get(code, "interrupted"),
            exit_code=code,
            problems=(*_list_problems(error), *self.problems),
            facts=self.facts,
            next=tuple(
                NextStep(command=command, purpose=purpose)
                for command, purpose in self.next or _advise_after(code, error)
            ),
        )


_CURRENT: ContextVar[Reply] = ContextVar("reply")


@contextmanager
def replying(reply: Reply) -> Iterator[None]:
    """Make a reply that of the command which runs in the body."""
    token = _CURRENT.set(reply)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_reply() -> Reply:
    """Return the reply of the command that runs, or one that owes nothing."""
    return _CURRENT.get(Reply())


def _list_problems(error: BaseException | None) -> list[Problem]:
    if isinstance(error, CaseError):
        return error.problems
    if isinstance(error, FormatError):
        return [error.place]
    return [] if error is None else [Problem(read_message(error) or type(error).__name__)]


def _advise_after(code: int, error: BaseException | None) -> list[tuple[str, str]]:
    """Return the command to try after an error, as (command, purpose)."""
    if code == 3 or isinstance(error, MachineError):
        return [("moeverify doctor", "the abilities of this machine")]
    again = shlex.join(["moeverify", *sys.argv[1:]])
    return [] if error is None else [(again, "the same command, after the remedies of all problems")]


def _format_brief(answer: CommandAnswer) -> str:
    """Return an answer as JSON of less than 4 kB."""
    from moeverify.report.sanitize import elide
    from moeverify.results.brief import MOST_BYTES

    text = answer.model_dump_json()
    for most, width in _BRIEF_LIMITS:
        if len(text.encode()) < MOST_BYTES:
            break
        shown = (
            Problem(
                elide(each.message, width),
                elide(each.file, width),
                each.line,
                remedy=elide(each.remedy, width),
            )
            for each in answer.problems[:most]
        )
        changes = {"problems": tuple(shown), "facts": None, "next": answer.next if width else ()}
        text = answer.model_copy(update=changes).model_dump_json()
    return text
