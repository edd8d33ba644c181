"""`moeverify comm`: one collective on real ranks, with the inputs and outputs of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.arguments import Backend, BackendOption, Device, DeviceOption, WorldSize
from moeverify.cli.context import EXIT_CODES, open_context
from moeverify.results.collective_name import CollectiveName

_Name = Annotated[
    CollectiveName,
    typer.Argument(metavar="COLLECTIVE", help=f"{', '.join(CollectiveName)}.", show_default=False),
]
_Size = Annotated[int, typer.Option("--size", min=1, max=64, help="Elements of each part.")]
_Splits = Annotated[
    Path | None,
    typer.Option("--splits", metavar="FILE", help="Parts of different sizes: a YAML file with `splits:`."),
]
_Source = Annotated[
    int, typer.Option("--source", min=0, metavar="RANK", help="The rank that a broadcast begins at.")
]
_Backward = Annotated[bool, typer.Option("--backward", help="Show the gradients too.")]


def comm(
    collective: _Name,
    *,
    world_size: WorldSize = 4,
    size: _Size = 2,
    splits: _Splits = None,
    source: _Source = 0,
    backward: _Backward = False,
    device: DeviceOption = Device.auto,
    backend: BackendOption = Backend.auto,
) -> None:
    """Run one collective on real ranks, and show the input, sends, receives and output of each.

    Element i of rank r is 100 r + i, so that a number says where it comes from. The outputs are compared with the
    definition, bit for bit.
    """
    with open_context() as context:
        from moeverify.report.collective_run import render_collective
        from moeverify.report.progress import show_work
        from moeverify.verification.controller.collective import run_collective

        sizes = _choose_sizes(collective, world_size, size, splits, source)
        with show_work(context.err, f"running {collective} on {world_size} ranks"):
            found = run_collective(
                collective,
                sizes,
                num_ranks=world_size,
                source=source,
                backward=backward,
                device=device.value,
                backend=backend.value,
            )
        if found is None:  # only the first of several ranks reports
            return
        render_collective(found, context.out)
        context.reply.document = found.model_dump_json(indent=1)
        raise typer.Exit(EXIT_CODES["mismatch" if found.wrong_ranks else "pass"])


def _choose_sizes(
    collective: CollectiveName, ranks: int, size: int, splits: Path | None, source: int
) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of all parts in the form that `define_transfer` expects.

    Raises: CaseError listing all problems of the options, or of the file.
    """
    from moeverify.cases.validation.splits_file import read_splits
    from moeverify.errors import CaseError, Problem
    from moeverify.verification.collectives.definition import TAKES_SPLITS

    problems = []
    if splits is not None and collective not in TAKES_SPLITS:
        message = f"every rank of {collective} has the same number of elements"
        problems.append(Problem(message, path="--splits", remedy="use --size"))
    if source >= ranks:
        message = f"there is no rank {source} among {ranks}"
        problems.append(Problem(message, path="--source", remedy=f"write a number below {ranks}"))
    if source and collective is not CollectiveName.BROADCAST:
        message = f"{collective} begins at no rank"
        problems.append(Problem(message, path="--source", remedy="leave it out"))
    if problems:
        raise CaseError(problems)
    num_dims = TAKES_SPLITS.get(collective, 1)
    if splits is not None:
        return read_splits(splits, ranks, num_dims)
    return ((size,) * ranks,) * (ranks if num_dims == 2 else 1)
