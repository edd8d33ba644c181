"""Rows of floating-point inputs, such as images, numbered so that rows equal up to rounding have one number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from moeverify.scripts.record.draw import INPUT, is_input
from moeverify.scripts.record.lines import Drawn, Rows
from moeverify.scripts.record.read import RankRecord, RecordedRun

_NUM_PROJECTIONS = 16
_CHUNK = 1 << 16  # columns that are projected together
_Key = tuple[int, int, str, tuple[int, ...]]  # step, number of the model, input, shape of a row
_Source = tuple[int, int, Drawn, Tensor]  # number of the run, rank, line, projections of its rows


def add_float_rows(
    expected: RecordedRun, actual: RecordedRun, bounds: Mapping[int, float]
) -> tuple[RecordedRun, RecordedRun]:
    """Return both runs, whose rows include those of floating-point inputs that both have.

    `bounds` has the relative error of equal rows for each compared step: inputs may be computed, such as
    noised images. If `actual` has all rows of `expected`, its other ones are left out: a pipeline stage gets
    activations.
    """
    runs = (expected, actual)
    found: dict[tuple[int, int], list[Rows]] = defaultdict(list)
    for step, bound in bounds.items():
        by_key: dict[_Key, list[_Source]] = defaultdict(list)
        for number, run in enumerate(runs):
            for rank in run.ranks:
                for line in _list_lines(rank, step):
                    source = (number, rank.rank, line, _project(rank.read_drawn(line)))
                    by_key[step, line.model, line.name, line.shape[1:]].append(source)
        for sources in by_key.values():
            for (number, rank_number, line, _), rows in zip(sources, _number(sources, bound), strict=True):
                found[number, rank_number].append(_make_rows(line, rows))
    one, two = (
        replace(
            run, ranks=[replace(rank, rows=[*rank.rows, *found[number, rank.rank]]) for rank in run.ranks]
        )
        for number, run in enumerate(runs)
    )
    return one, two


def _list_lines(rank: RankRecord, step: int) -> list[Drawn]:
    return [
        line
        for line in rank.drawn
        if line.step == step
        and is_input(line.name)
        and len(line.shape) > 1
        and getattr(torch, line.dtype).is_floating_point
    ]


def _project(rows: Tensor) -> Tensor:
    """Return random projections, whose distances estimate those of the rows. Shapes: (N, ...); (N, 16)."""
    flat = rows.reshape(len(rows), -1)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(len(flat), _NUM_PROJECTIONS, dtype=torch.float64)
    for start in range(0, flat.shape[1], _CHUNK):
        part = flat[:, start : start + _CHUNK]
        directions = torch.randn(part.shape[1], _NUM_PROJECTIONS, generator=generator, dtype=torch.float64)
        total += part.double() @ directions
    return total.nan_to_num()


def _number(sources: Sequence[_Source], bound: float) -> list[tuple[int, ...]]:
    """Return the numbers of each source's rows: that of the first row that is equal up to the bound."""
    points = torch.cat([each for *_, each in sources])
    norms = points.norm(dim=1)
    largest = torch.maximum(norms[:, None], norms[None, :])
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    firsts = iter((distances <= bound * largest).int().argmax(dim=1).tolist())
    parts = [tuple(islice(firsts, len(each))) for *_, each in sources]
    by_run = [
        {row for (number, *_), part in zip(sources, parts, strict=True) if number == run for row in part}
        for run in (0, 1)
    ]
    if by_run[0] <= by_run[1]:
        parts = [tuple(row for row in part if row in by_run[0]) for part in parts]
    return parts


def _make_rows(line: Drawn, rows: tuple[int, ...]) -> Rows:
    name = line.name.removeprefix(INPUT) + (f" of model{line.model}" if line.model else "")
    return Rows(step=line.step, forward=line.forward, name=name, shape=line.shape, rows=rows, site=line.site)
