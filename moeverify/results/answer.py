"""The results of commands that verify nothing, and errors of all commands with `--json`. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.errors import Problem
from moeverify.results.benchmark_rows import CleanRow
from moeverify.results.bisection import CommitJudgement
from moeverify.results.brief import NextStep
from moeverify.results.factory import TriedModel
from moeverify.results.golden import GoldenPlan, GoldenRow
from moeverify.results.listed import CheckedCases, ListedFaults
from moeverify.results.mesh import MeshPictures
from moeverify.results.record import Record

Value = bool | int | float | str | None


class TriedLayout(Record):
    """A layout that `moeverify init` tried. `obstacle` says why it does not apply to the model."""

    name: str
    verdict: str
    obstacle: str = ""


class WrittenFile(Record):
    """A file of `moeverify init`; `state` is `edited` if it was left alone, and `printed` with `--dry-run`."""

    path: str
    state: str


class InitResult(Record):
    """The facts of `moeverify init`."""

    model: TriedModel
    layouts: tuple[TriedLayout, ...]
    files: tuple[WrittenFile, ...] = ()


class ShrinkResult(Record):
    """The facts of `moeverify shrink`: `changes` has the fields of the smallest case, as (before, after).

    `is_whole` means that the search was not interrupted, and `num_tried` counts the smaller cases.
    """

    case: str
    file: str
    written: str
    ranks: tuple[int, int]
    changes: dict[str, tuple[Value, Value]]
    finding: CommitJudgement
    num_tried: int
    is_whole: bool


class Goldens(Record):
    """The facts of `moeverify golden`; `plans` are those of `--plan`."""

    goldens: tuple[GoldenRow, ...] = ()
    plans: tuple[GoldenPlan, ...] = ()


class ConvertResult(Record):
    """The facts of `moeverify convert`."""

    source: str
    source_kind: str
    destination: str
    destination_kind: str
    num_tensors: int
    num_bytes: int
    num_files: int
    seconds: float


class CleanRuns(Record):
    """The facts of `moeverify faults clean`."""

    environment: dict[str, str]
    runs: tuple[CleanRow, ...]


class RunChange(Record):
    """One difference between two runs: its subject, and the state before and after, in words."""

    kind: str
    subject: str
    before: str
    after: str


class RunChanges(Record):
    """The facts of `moeverify diff`."""

    changes: tuple[RunChange, ...]


class HistoryRow(Record):
    """A kept run; `share` is its largest error over its bound, of the tensor `worst`."""

    name: str
    started: str
    verdict: str
    num_passed: int
    num_ran: int
    share: float | None
    worst: str
    seconds: float


class HistoryRows(Record):
    """The facts of `moeverify history`, with the files that could not be read."""

    runs: tuple[HistoryRow, ...]
    left_out: tuple[str, ...] = ()


CommandFacts = (
    InitResult
    | ShrinkResult
    | CheckedCases
    | Goldens
    | MeshPictures
    | ConvertResult
    | ListedFaults
    | CleanRuns
    | RunChanges
    | HistoryRows
)

Status = Literal["pass", "mismatch", "bad-input", "error", "undecided", "interrupted"]


class CommandAnswer(Record):
    """The result of a command; `status` is the meaning of its exit code.

    `problems` are those of the input, or the error that ended the command. `facts` depend on the command, and
    are left out if it ended before them. `next` has commands to run as they are.
    """

    schema_version: Literal[1] = 1
    command: str
    status: Status
    exit_code: int
    problems: tuple[Problem, ...] = ()
    facts: CommandFacts | None = None
    next: tuple[NextStep, ...] = ()
