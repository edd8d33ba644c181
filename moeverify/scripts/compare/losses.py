"""Losses of two runs with equal rows and weights: they tell errors of the forward pass from later ones."""

from __future__ import annotations

import math
from statistics import fmean

from moeverify.results.observation import OtherLosses
from moeverify.scripts.record.read import RankRecord, RecordedRun

_EQUAL, _APART = 2.0**-18, 2.0**-13  # relative: rounding of a mean, and more than rounding in float32


def find_losses(expected: RecordedRun, actual: RecordedRun, step: int) -> OtherLosses | None:
    """Return the losses of a step with equal rows, or None if they are unknown or neither equal nor apart.

    A forward pass that has the same rows in both runs shows its own loss. Otherwise the mean over ranks of
    all losses of the step is that of one device, if each loss is a mean over as many tokens.
    """
    if not all(rank.rows or rank.drawn for run in (expected, actual) for rank in run.ranks):
        return None
    wanted = {rows: loss for rank in expected.ranks for rows, loss in _list_passes(rank, step)}
    pairs = [
        (rank.rank, wanted[rows], loss)
        for rank in actual.ranks
        for rows, loss in _list_passes(rank, step)
        if rows in wanted
    ]
    has_outputs = all(rank.outputs for run in (expected, actual) for rank in run.ranks)
    if pairs:
        found: int | None
        found, one, two = max(pairs, key=lambda each: _measure(each[1], each[2]))
    else:
        totals = [_sum_losses(run, step) for run in (expected, actual)]
        if totals[0] is None or totals[1] is None:
            return None
        found, one, two = None, totals[0], totals[1]
    distance = _measure(one, two)
    if not distance <= _EQUAL and not distance >= _APART:
        return None
    return OtherLosses(
        step=step,
        expected=one,
        actual=two,
        differ=distance >= _APART,
        rank=found if distance >= _APART else None,
        has_outputs=has_outputs,
    )


def _measure(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), abs(two), 1e-30)


def _list_losses(rank: RankRecord, step: int) -> list[float]:
    return [loss for call in rank.calls if call.step == step for loss in call.losses]


def _list_passes(rank: RankRecord, step: int) -> list[tuple[tuple[int, ...], float]]:
    """Return the rows and the loss of each forward pass; empty if there are more or fewer losses than passes."""
    names = {row.name for row in rank.rows if row.step == step}
    if not names:
        return []
    passes = [row.rows for row in rank.rows if row.step == step and row.name == min(names)]
    losses = _list_losses(rank, step)
    return list(zip(map(tuple, passes), losses, strict=True)) if len(passes) == len(losses) else []


def _sum_losses(run: RecordedRun, step: int) -> float | None:
    totals = [_list_losses(rank, step) for rank in run.ranks]
    if not all(totals) or not all(map(math.isfinite, (loss for each in totals for loss in each))):
        return None
    return fmean(sum(each) for each in totals)
