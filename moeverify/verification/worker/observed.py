"""Training of a case on one rank, with observers and checks attached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import multiprocessing_pdb
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.schema import Case
from moeverify.parallel.regions.observer import Observer
from moeverify.train.loop import train
from moeverify.train.program import TrainingProgram
from moeverify.train.subjects import replays_routing
from moeverify.verification.checks.base import Check, Training, Watch
from moeverify.verification.checks.bounds import Bounds
from moeverify.verification.checks.observers import open_observers
from moeverify.verification.golden.store import StoredGolden
from multiprocessing_pdb.rank.reference import Reference


def train_observed(
    case: Case,
    golden: StoredGolden,
    program: TrainingProgram,
    observer: Observer,
    checks: Sequence[Check[Any]],
    watches: Sequence[Watch[Any]] = (),
    *,
    num_steps: int | None = None,
    reference: Reference | None = None,
) -> list[float]:
    """Train under the layout with the checks attached, and return the learning rate of each step.

    If the rank stops in the debugger, `diff --golden` compares with `reference`.
    """
    place = list_coordinates(case)[dist.get_rank()]
    training = Training(case.recipe, program, case.layout, place, golden)
    with open_observers(training, observer, checks, watches) as observers, _comparing_with(reference):
        return train(
            case.recipe,
            program,
            observers,
            golden=golden,
            replay_routing=replays_routing(case.recipe),
            forced=case.checks.steps == "forced",
            num_steps=num_steps,
        )


@contextmanager
def _comparing_with(reference: Reference | None) -> Iterator[None]:
    """Set the reference of `diff --golden` for the duration of the block."""
    multiprocessing_pdb.set_reference(reference)
    try:
        yield
    finally:
        multiprocessing_pdb.set_reference(None)


def make_bounds(case: Case, golden: StoredGolden) -> Bounds:
    """Return the bounds on differences between a case's tensors and its golden."""
    # In float64 a free-running step rounds no more than a forced one, so one calibration serves both.
    forced = case.checks.steps == "forced" and case.recipe.precision != "float64"
    return Bounds(case.checks.tolerance, case.recipe.precision, golden.noise, forced)


def list_coordinates(case: Case) -> dict[int, dict[str, int]]:
    """Return the coordinates of each rank on every mesh axis."""
    plan = MeshPlan.of(case.layout)
    return {rank: plan.coordinates(rank) for rank in range(case.layout.world_size)}
