"""Races: uses of memory that a collective may still be using."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeverify.explain.cause import OperatorCause
from moeverify.explain.joint import Joint
from moeverify.explain.suspects import Target


def list_races(joint: Joint, step: int, results: Sequence[Target]) -> Iterator[OperatorCause]:
    """Yield races that a result depends on, up to `step`. `results` are the wrong ones, or all if none is wrong."""
    for rank, program in enumerate(joint.programs):
        for race in program.races:
            if not race.is_direct or program.ops[race.op].step > step or race.other >= len(program.ops):
                continue
            ops = {(rank, race.op), (rank, race.other)}
            reached = [
                target
                for target in results
                if any(ops & joint.list_before([at]) for at in target.values.values())
            ]
            if reached:
                yield OperatorCause([(rank, race.other)], [], reached, known="race", launch=(rank, race.op))
