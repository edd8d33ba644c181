"""Cases in mixed precision: who watches the dtypes of a run, and the verdict on them."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.case.schema import Case
from moeverify.checks.dtype_watch import DtypeTap
from moeverify.checks.precision import Seen, Wanted, judge_precision
from moeverify.collectives.trace import CollectiveTrace
from moeverify.compare.judging import Coordinates, Judgement
from moeverify.layout.observer import Observer
from moeverify.train.program import Program, compute_dtype_of, dtype_of


def tap_dtypes(case: Case, program: Program, observer: Observer, trace: CollectiveTrace) -> DtypeTap | None:
    """Return an observer before the given one that watches dtypes; None where all are the same anyway."""
    if case.recipe.precision != "mixed":
        return None
    return DtypeTap(observer, program.model, compute_dtype_of(case.recipe.precision), trace.since)


def judge_dtypes(
    case: Case, by_rank: Sequence[Sequence[Seen] | None], coordinates: Coordinates
) -> Judgement | None:
    """Return the verdict on what the ranks saw; None where nobody watched."""
    seen = [sightings for sightings in by_rank if sightings is not None]
    if not seen:
        return None
    compute, kept = (
        str(dtype(case.recipe.precision)).removeprefix("torch.") for dtype in (compute_dtype_of, dtype_of)
    )
    return judge_precision(seen, Wanted(compute, kept, case.layout.in_float32), coordinates)
