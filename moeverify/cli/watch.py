"""`moeverify watch`: records the optimizer's inputs and effects in an unmodified training script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import Debug, OutFolder, Seed
from moeverify.cli.context import EXIT_CODES, CommandContext, open_context

if TYPE_CHECKING:
    from moeverify.errors import Problem
    from moeverify.scripts.record.hangs import HangReporter
    from moeverify.scripts.record.settings import Settings

_MEBIBYTE = 2**20


class NudgeDtype(StrEnum):
    """Narrow dtypes whose rounding unit `--nudge` may apply to wider weights."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Reaction(StrEnum):
    """Reaction to a finding of `--guard`, or to a hang."""

    WARN = "warn"
    STOP = "stop"


Steps = Annotated[str, typer.Option("--steps", metavar="A-B", help="The optimizer steps to record, from 0.")]
Limit = Annotated[
    float,
    typer.Option("--limit", min=0.0, metavar="MIB", help="Keep only a sketch of tensors above this size."),
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="RUN", help="Begin with the initial weights of this recorded run."),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="RUN",
        help="Replay the batches of this recorded run on one device.",
    ),
]
Nudge = Annotated[
    int | None,
    typer.Option(
        "--nudge",
        metavar="SEED",
        help="Move every initial weight by one unit of rounding, for `compare --noise`.",
    ),
]
NudgeDtypeOption = Annotated[
    NudgeDtype | None,
    typer.Option(
        "--nudge-dtype", help="With --nudge: the dtype that the script computes in, if its weights are wider."
    ),
]
Outputs = Annotated[bool, typer.Option("--outputs", help="Record the inputs and outputs of modules, too.")]
Operators = Annotated[
    int | None,
    typer.Option(
        "--operators",
        min=0,
        metavar="STEP",
        help="Record every operator of this step, for `moeverify operators`.",
    ),
]
Code = Annotated[
    bool,
    typer.Option(
        "--code/--no-code",
        help="Record executed lines and Python values of the script, to find wrong lines.",
    ),
]

Guard = Annotated[bool, typer.Option("--guard", help="Record nothing; check this one run while it trains.")]
Every = Annotated[
    int, typer.Option("--every", min=2, metavar="N", help="With --guard: sample every N-th step.")
]
OnFinding = Annotated[Reaction, typer.Option("--on-finding", help="With --guard: go on, or end the script.")]
Hang = Annotated[
    float,
    typer.Option(
        "--hang",
        min=1.0,
        metavar="S",
        help="Report where the ranks wait if a collective takes more than S seconds.",
    ),
]
OnHang = Annotated[
    Reaction,
    typer.Option("--on-hang", help="After the report of --hang: go on, or end the script with exit code 3."),
]


_OF_RECORDING = (
    "steps",
    "limit",
    "weights",
    "replay",
    "seed",
    "nudge",
    "nudge_dtype",
    "outputs",
    "operators",
    "code",
)
_OF_GUARD = ("every", "on_finding", "debug")


def watch(
    arguments: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="After `--`: the command that starts the script, e.g. `-- torchrun ... train.py`.",
        ),
    ],
    *,
    out: OutFolder = None,
    steps: Steps = "0-3",
    limit: Limit = 64.0,
    weights: Weights = None,
    replay: Replay = None,
    seed: Seed = None,
    nudge: Nudge = None,
    nudge_dtype: NudgeDtypeOption = None,
    outputs: Outputs = False,
    operators: Operators = None,
    code: Code = True,
    guard: Guard = False,
    every: Every = 16,
    on_finding: OnFinding = Reaction.WARN,
    debug: Debug = False,
    hang: Hang = 60.0,
    on_hang: OnHang = Reaction.WARN,
) -> None:
    """Run a training script and record some of its steps, for `moeverify compare`; or check it with `--guard`.

    Reports hangs in collectives. The output and the exit code are those of the script.
    """
    from moeverify.verification.controller.scratch import scratch_folder

    with open_context() as context, scratch_folder() as folder:
        _refuse_unused(arguments, guard=guard)
        hangs = _report_hangs(folder, context, hang, stops=on_hang is Reaction.STOP)
        if guard:
            from moeverify.cli.guard import run_guarded

            stops = on_finding is Reaction.STOP
            exit_code = run_guarded(command, context, out, folder, every, hangs, stops=stops, debug=debug)
        else:
            recording = _make_settings(
                out,
                steps,
                limit,
                weights,
                seed,
                replay=replay,
                nudge=nudge,
                nudge_dtype=nudge_dtype,
                outputs=outputs,
                operators=operators,
                code=code,
            )
            exit_code = _record(command, recording, hangs, context)
        raise typer.Exit(EXIT_CODES["error"] if hangs.has_ended_script else exit_code)


def _refuse_unused(arguments: typer.Context, *, guard: bool) -> None:
    """Refuse options that only a recording, or only the guard, reads.

    Raises: CaseError listing them.
    """
    from moeverify.errors import CaseError, Problem

    reason = "nothing is recorded with --guard" if guard else "it is an option of --guard"
    remedy = "leave it out, or record without --guard" if guard else "leave it out, or give --guard"
    problems = [
        Problem(reason, path=f"--{name.replace('_', '-')}", remedy=remedy)
        for name in (_OF_RECORDING if guard else _OF_GUARD)
        if getattr(arguments.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if problems:
        raise CaseError(problems)


def _report_hangs(folder: Path, context: CommandContext, limit: float, *, stops: bool) -> HangReporter:
    from moeverify.scripts.record.hangs import HangReporter, HangSettings

    settings = HangSettings(limit=limit, stops=stops)
    return HangReporter(folder / "ranks", settings, lambda lines: _show_hang(context, lines))


def _show_hang(context: CommandContext, lines: Sequence[str]) -> None:
    for indent, line in zip(("moeverify watch: ", *["    "] * len(lines)), lines, strict=False):
        context.err.print(indent + line, soft_wrap=True)


def _record(command: list[str], settings: Settings, hangs: HangReporter, context: CommandContext) -> int:
    from moeverify.report.words.script import describe_recorded, describe_unseen
    from moeverify.scripts.record.command import count_steps, run_command
    from moeverify.scripts.record.settings import VARIABLE

    code = run_command(command, {VARIABLE: settings.model_dump_json()}, hangs)
    steps = count_steps(settings.out)
    if steps:
        text = describe_recorded(str(settings.out), steps, settings.first, settings.last)
        context.err.print(f"moeverify watch: {text}", soft_wrap=True)
    else:
        context.err.print(f"moeverify watch: nothing was recorded: {describe_unseen()}", soft_wrap=True)
    return code


def _make_settings(
    out: Path | None,
    steps: str,
    limit: float,
    weights: Path | None,
    seed: int | None,
    *,
    replay: Path | None,
    nudge: int | None,
    nudge_dtype: NudgeDtype | None,
    outputs: bool,
    operators: int | None,
    code: bool,
) -> Settings:
    """Return the settings of the recording.

    Raises: CaseError listing all problems of the options.
    """
    from moeverify.errors import CaseError, Problem
    from moeverify.report.files import check_writable
    from moeverify.scripts.record.settings import Settings

    first, last = _read_range(steps)
    settings = Settings(
        out=out or Path(),
        first=first,
        last=last,
        limit=int(limit * _MEBIBYTE),
        weights=weights,
        replay=replay,
        seed=seed,
        nudge=nudge,
        nudge_dtype=None if nudge_dtype is None else nudge_dtype.value,
        outputs=outputs,
        operators=operators,
        code=code,
    )
    problems = []
    if last < first:
        problems.append(Problem(f"`{steps}` is no range of steps", path="--steps", remedy="write 0-3, or 5"))
    if out is None:
        problems.append(
            Problem("nothing says where to record", path="--out", remedy="give --out DIR, or --guard")
        )
    problems += _find_problems(settings, out)
    if problems or out is None:
        raise CaseError(problems)
    check_writable([], out)
    resolved = {"out": out.resolve()}
    resolved |= {
        name: folder.resolve()
        for name, folder in (("weights", weights), ("replay", replay))
        if folder is not None
    }
    return settings.model_copy(update=resolved)


def _find_problems(settings: Settings, out: Path | None) -> Iterator[Problem]:
    """Yield the problems of the folders and of options that depend on others."""
    from moeverify.errors import Problem
    from moeverify.scripts.record.settings import RANK_FILE

    step = settings.operators
    if out is not None and any(out.glob(RANK_FILE.format(rank="*"))):
        yield Problem(f"{out} holds a recorded run", path="--out", remedy="name another folder, or remove it")
    if step is not None and not settings.includes(step) and settings.first <= settings.last:
        range_ = f"{settings.first}-{settings.last}"
        yield Problem(
            f"step {step} is not recorded",
            path="--operators",
            remedy=f"name one of {range_}, or other --steps",
        )
    if settings.nudge_dtype is not None and settings.nudge is None:
        yield Problem(
            "nothing is nudged", path="--nudge-dtype", remedy="give --nudge SEED too, such as --nudge 1"
        )
    for option, folder in (("--weights", settings.weights), ("--replay", settings.replay)):
        if folder is not None and not any(folder.glob(RANK_FILE.format(rank="*"))):
            yield Problem(
                f"{folder} holds no recorded run",
                path=option,
                remedy="name a folder that `moeverify watch --out` made",
            )


def _read_range(steps: str) -> tuple[int, int]:
    """Return the first and last step; the last is below the first if the text is not a range."""
    match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", steps.strip())
    return (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
