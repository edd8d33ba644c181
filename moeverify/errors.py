"""Every error that moeverify raises on purpose, with what the reader should do about it."""

from __future__ import annotations

from dataclasses import dataclass

MOST_PROBLEMS = 20
"""How many problems of one file are listed: a checkpoint of another model has thousands."""


class MoeverifyError(Exception):
    """The root of all errors that moeverify raises on purpose."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what a user wrote.

    `file` and `line` (counted from 1) say where, `path` is the dotted path of the field, `message` says what
    is wrong, `remedy` what to write instead.
    """

    message: str
    file: str = ""
    line: int | None = None
    path: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return `file:line: path: message; remedy`, leaving out what is unknown."""
        place = self.file + (f":{self.line}" if self.line is not None else "")
        head = ": ".join(part for part in (place, self.path, self.message) if part)
        return head + (f"; {self.remedy}" if self.remedy else "")


class CaseError(MoeverifyError):
    """What a user wrote cannot be run; `problems` holds everything that is wrong, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class FormatError(MoeverifyError):
    """A file of ours (a golden, a run, a cache) is unreadable, truncated or of another version.

    `problem` says what is wrong with it, `remedy` what to do about it, where it is known.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


def join_problems(problems: list[str]) -> str:
    """Return several problems as the text of one error, a line each; of very many the first."""
    shown = problems[:MOST_PROBLEMS]
    more = len(problems) - len(shown)
    return "\n".join([*shown, f"and {more} more"] if more else shown)


class MachineError(MoeverifyError):
    """This machine cannot run what was asked: too few GPUs, a backend or a package that is not there."""


class RankFailure(MoeverifyError):
    """A rank crashed, was killed or hung; the report holds its traceback or stack and its last collective."""
