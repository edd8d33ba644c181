"""On every rank: train a case as far as a finding, and stop in the debugger with what was expected at the prompt."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

from moeverify.axes.mesh import MeshPlan
from moeverify.case.schema import Case
from moeverify.checks.base import Watch
from moeverify.checks.registry import choose_checks
from moeverify.compare.gather import gather_on_first
from moeverify.faults.injection import injected
from moeverify.golden.store import StoredGolden
from moeverify.jobs import DebugResult, StopPoint
from moeverify.layout.region import Region
from moeverify.parallel.meshes import build_meshes
from moeverify.worker.verify import Assembly, train_observed

_LOOP = "moeverify.train.loop"


class StopWatch(Watch[bool]):
    """Stops this rank once it has made the tensor that a finding is about; reports whether it has."""

    def __init__(self, at: StopPoint, golden: StoredGolden) -> None:
        self._at = at
        self._golden = golden
        self._has_stopped = False

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Stop where the tensor is the finding's; see `Watch`."""
        if (step, kind, name) != (self._at.step, self._at.kind, self._at.tensor):
            return
        import multiprocessing_pdb

        self._has_stopped = True
        expected = self._golden.read(step, kind, name, region)
        values = {"expected": expected, "actual": local, "region": region}
        multiprocessing_pdb.stop(self._at.about, frame=_find_loop(), frame_locals=values)

    def report(self) -> bool:
        """Return whether this rank has stopped; see `Watch`."""
        return self._has_stopped


def _find_loop() -> FrameType:
    """Return the frame of the training loop that shows the tensor: what is beneath it is the comparison's."""
    caller = frame = sys._getframe(2)
    while frame.f_globals.get("__name__") != _LOOP:
        if frame.f_back is None:
            return caller
        frame = frame.f_back
    return frame


def debug_case(
    case: Case, golden: StoredGolden, device: torch.device, at: StopPoint, fault: str | None = None
) -> DebugResult | None:
    """Return on rank 0 which ranks have stopped; None on the others.

    Ranks that do not have the tensor wait in their next collective for those that have: the timeouts of all process
    groups are raised meanwhile. Collective: all ranks of the default process group.
    """
    import multiprocessing_pdb

    with injected(fault):
        assemble_program = Assembly(case, device, build_meshes(case.layout, device.type))
        multiprocessing_pdb.arm(hold=True)
        try:
            watch = StopWatch(at, golden)
            checks = choose_checks(also=case.checks.also, skip=case.checks.skip)
            train_observed(case, golden, assemble_program(), watch, checks, num_steps=max(at.step, 0) + 1)
        finally:
            multiprocessing_pdb.disarm()
    stopped = gather_on_first(watch.report())
    if stopped is None:
        return None
    world_size = MeshPlan.of(case.layout).world_size
    return DebugResult(ranks=tuple(rank for rank in range(world_size) if stopped[rank]))
