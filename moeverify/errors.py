"""The exceptions that moeverify raises deliberately, with remedies for the user."""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_TEXT = 10_000
"""Maximum number of characters of a text of a user's program in a report."""

MOST_PROBLEMS = 20
"""Maximum number of problems listed for one file; a checkpoint of another model has thousands."""


class MoeverifyError(Exception):
    """The base class of all exceptions that moeverify raises deliberately."""


@dataclass(frozen=True)
class Problem:
    """One problem with the user's input.

    `file` and `line` (counted from 1) are its location, and `path` is the dotted path of the field.
    `message` describes the problem, and `remedy` how to fix it.
    """

    message: str
    file: str = ""
    line: int | None = None
    path: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return `file:line: path: message; remedy`, omitting unknown parts."""
        place = self.file + (f":{self.line}" if self.line is not None else "")
        head = ": ".join(part for part in (place, self.path, self.message) if part)
        return head + (f"; {self.remedy}" if self.remedy else "")


class CaseError(MoeverifyError):
    """The user's input cannot be run; `problems` lists everything that is wrong."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class FormatError(MoeverifyError):
    """A file written by moeverify (a golden, a run, a cache) is unreadable, truncated or of another version.

    `problem` describes the defect with its place, and `remedy` how to fix it, if known. `place` has the same in
    parts: `file`, `line` and `path` are those of a `Problem`.
    """

    def __init__(
        self, message: str, remedy: str = "", *, file: str = "", line: int | None = None, path: str = ""
    ) -> None:
        self.place = Problem(message, file, line, path, remedy)
        self.problem = str(replace(self.place, remedy=""))
        self.remedy = remedy
        super().__init__(str(self.place))


def join_problems(problems: list[str]) -> str:
    """Return several problems as the text of one error, one per line, at most `MOST_PROBLEMS`."""
    shown = problems[:MOST_PROBLEMS]
    more = len(problems) - len(shown)
    return "\n".join([*shown, f"and {more} more"] if more else shown)


def cut_text(text: str, most: int = MOST_TEXT) -> str:
    """Return a text of at most about `most` characters; a note replaces the middle of a longer one."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters are left out here ...\n{text[-half:]}"


def read_message(error: BaseException) -> str:
    """Return the text of an exception of any program, cut if it is long; its `__str__` may raise."""
    try:
        return cut_text(str(error))
    except Exception as problem:
        return f"(its __str__ raised {type(problem).__name__})"


class MachineError(MoeverifyError):
    """This machine cannot run the request: too few GPUs, or a missing backend or package."""


class RankFailure(MoeverifyError):
    """A rank crashed, was killed or hung; the message contains its stack and its last collective."""
