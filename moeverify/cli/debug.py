"""`moeverify run --debug`: stops the ranks of the first failed case in multiprocessing_pdb."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeverify.cli.context import CommandContext

if TYPE_CHECKING:
    from moeverify.cases.schema import Case
    from moeverify.results.run import RunResult
    from moeverify.verification.controller.options import RunOptions

_JOB = "MPDB_JOB"  # consoles find the ranks by this job name, which the ranks inherit
_AT_TENSOR = "`diff --golden actual`; at a prompt: expected, actual, region"
_AT_COLLECTIVE = (
    "`diff issued`; at a prompt: issued, operands, and peers (the earlier collectives of each rank)"
)


def debug_first(
    cases: Sequence[Case], result: RunResult, options: RunOptions, context: CommandContext
) -> None:
    """Train the first failed case again until its ranks have stopped and continued.

    Raises: RankFailure if a rank is lost.
    """
    from moeverify.report.numbers import format_ranks
    from moeverify.verification.controller.debug import debug_case, find_stop
    from moeverify.verification.launch.world import external_world

    if external_world() is not None:
        context.err.print(
            "--debug: these ranks belong to another launcher; without it moeverify starts its own"
        )
        return
    by_name = {case.name: case for case in cases}
    stops = [
        (by_name[each.name], at)
        for each in result.cases
        if each.has_failed and each.name in by_name and (at := find_stop(each)) is not None
    ]
    if not stops:
        context.err.print(
            "--debug: nothing found is about a tensor that ranks make, or a collective that they issue differently,"
            " so there is nowhere to stop"
        )
        return
    case, at = stops[0]
    os.environ.setdefault(_JOB, f"moeverify-{os.getpid()}")

    where, hint = f"when they have made {at.about}", _AT_TENSOR
    if at.place is not None:
        where = f"inside {at.place.about}, or else {where}"
    if at.collective is not None:
        where, hint = f"before {at.about}", _AT_COLLECTIVE

    def announce() -> None:
        context.out.print(
            f"debug  {case.name} trains again; its ranks stop {where}\n"
            f"       console, in another terminal: python -m multiprocessing_pdb {os.environ[_JOB]}\n"
            f"       there: {hint}; `@all c` lets ranks go on",
            soft_wrap=True,
            markup=False,
        )

    ranks = debug_case(case, at, options, announce)
    told = f"ranks that stopped: {format_ranks(ranks)}" if ranks else "no rank came to it in this run"
    context.out.print(f"debug  {told}", soft_wrap=True)
