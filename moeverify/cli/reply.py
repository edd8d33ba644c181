"""The file of `--json`: checked before the work, and written when the command ends, after an error too."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moeverify.errors import CaseError, Problem, read_message

if TYPE_CHECKING:
    from moeverify.results.answer import CommandFacts, Status

_STATUS: dict[int, Status] = {0: "pass", 1: "mismatch", 2: "bad-input", 3: "error", 4: "undecided"}


@dataclass
class Reply:
    """The file of `--json` of a command, if any.

    A command sets `facts` and `next`, as (command, purpose), which become a `CommandAnswer`. A command with a
    `document` of its own has it written instead, and a `CommandAnswer` if it ended before.
    """

    command: str
    file: Path | None
    facts: CommandFacts | None = None
    next: list[tuple[str, str]] = field(default_factory=list)
    document: str = ""

    def advise(self, words: Sequence[object], purpose: str) -> None:
        """Add a command line of moeverify to `next`."""
        self.next.append((shlex.join(["moeverify", *map(str, words)]), purpose))

    def check(self) -> None:
        """Raises: CaseError if the file cannot be written."""
        from moeverify.report.files import check_writable

        if self.file is not None:
            try:
                check_writable([self.file])
            except CaseError:
                self.file = None
                raise

    def write(self, code: int, error: BaseException | None) -> None:
        """Write the file of a command that ends with an exit code, because of an error if there is one.

        Raises: OSError when writing fails.
        """
        if self.file is None:
            return
        from moeverify.report.files import write_atomically
        from moeverify.results.answer import CommandAnswer
        from moeverify.results.brief import NextStep

        if self.document:
            write_atomically(self.file, self.document)
            return
        answer = CommandAnswer(
            command=self.command,
            status=_STATUS.get(code, "interrupted"),
            exit_code=code,
            problems=tuple(_list_problems(error)),
            facts=self.facts,
            next=tuple(NextStep(command=command, purpose=purpose) for command, purpose in self.next),
        )
        write_atomically(self.file, answer.model_dump_json(indent=2) + "\n")


def _list_problems(error: BaseException | None) -> list[Problem]:
    if isinstance(error, CaseError):
        return error.problems
    return [] if error is None else [Problem(read_message(error) or type(error).__name__)]
