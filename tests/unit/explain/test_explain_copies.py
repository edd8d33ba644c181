"""Copies of a weight that ranks use, where one device uses the weight."""

from __future__ import annotations

import pytest
from recordings import make
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.copies import list_copies
from moeverify.explain.joint import Joint
from moeverify.explain.program import SETUP, Program
from moeverify.explain.record import Recorder
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind


def record_tied(*, copies: bool, moves: bool = False) -> Program:
    """Record a table that embeds and decodes; a rank may decode with a copy or a moved view of it."""
    table, x = make(6, 4), make(3, 4, seed=1)
    recorder = Recorder()
    recorder.name_tensors([("table", table), ("x", x)])
    with recorder.recording():
        recorder.begin_step(SETUP)
        head = table.clone() if copies else table

        def decode(rows: Tensor) -> Tensor:
            return rows @ (head[:] if moves else head).t()

        recorder.begin_step(0)
        loss = decode(table[:3] * x).sum()
        recorder.observe(0, Kind.LOSS, "total", loss, Region.whole(()))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


@pytest.mark.parametrize(
    ("copies", "moves", "found"), [(True, False, ["clone"]), (False, True, []), (False, False, [])]
)
def test_a_copy_from_before_the_first_step_is_no_weight(copies: bool, moves: bool, found: list[str]) -> None:
    rank = record_tied(copies=copies, moves=moves)
    alignment = Alignment(Joint([rank]), record_tied(copies=False))
    made = list_copies(alignment, 0, (0, Kind.GRADIENT, "table"))
    assert [rank.ops[number].short for _, number in made] == found
