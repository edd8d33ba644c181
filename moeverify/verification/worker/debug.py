"""Debug job: train a case up to a finding and stop every rank in the debugger.

The expected values are available at the prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

import multiprocessing_pdb
from moeverify.cases.schema import Case
from moeverify.faults.injection import injected
from moeverify.parallel.meshes import build_meshes
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import Watch
from moeverify.verification.checks.registry import choose_checks
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.compare.gather import gather_on_first
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.jobs import DebugResult, StopPoint
from moeverify.verification.worker.blamed_place import BlamedStop, read_expected
from moeverify.verification.worker.differing_collective import DifferingStop
from moeverify.verification.worker.golden_reference import GoldenReference
from moeverify.verification.worker.observed import make_bounds, train_observed
from moeverify.verification.worker.verify import Assembly

# Modules that observe tensors: their frames lie between the stop and the code that produced the tensor.
_INNER = (
    "moeverify.verification.worker.",
    "moeverify.verification.checks.",
    "moeverify.parallel.regions.observer",
    "moeverify.train.module_taps",
    "torch.",
)
_IN_PARAMETERS = frozenset(
    {
        Kind.INITIAL_WEIGHT,
        Kind.GRADIENT,
        Kind.UPDATE,
        Kind.WEIGHT,
        Kind.OPTIMIZER_STATE,
        CheckName.ACTIVATIONS,
    }
)


class StopWatch(Watch[bool]):
    """Watch that stops this rank at the tensor of a finding and reports whether the rank stopped.

    A rank without a part of the tensor, such as another pipeline stage, stops at the first tensor of the
    same kind. A rank that already stopped at the `blamed` place does not stop again.
    """

    def __init__(
        self,
        at: StopPoint,
        golden: StoredGolden,
        reference: GoldenReference,
        has_part: bool,
        blamed: BlamedStop | None = None,
    ) -> None:
        self._at = at
        self._golden = golden
        self._reference = reference
        self._has_part = has_part
        self._blamed = blamed
        self._watching = ExitStack()
        self._has_stopped = False

    def begin_step(self, step: int) -> None:
        """Arm the stop at the blamed place if this is its step; see `Watch`."""
        self._reference.begin_step(step)
        self.close()
        if self._blamed is not None and step == self._at.step:
            self._watching.enter_context(self._blamed.watching())

    def close(self) -> None:
        """Disarm the stop at the blamed place."""
        self._watching.close()

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Stop if this is the tensor of the finding; see `Watch`."""
        self._reference.observe(step, kind, name, local, region)
        if self._blamed is not None and self._blamed.has_stopped:
            return
        if (step, kind) != (self._at.step, self._at.kind):
            return
        if name == self._at.tensor:
            expected = self._golden.read(step, kind, name, region)
            self._stop(self._at.about, {"expected": expected, "actual": local, "region": region})
        elif not self._has_part and not self._has_stopped:
            self._stop(f"{self._at.about}, of which this rank has no part", {})

    def _stop(self, about: str, values: Mapping[str, object]) -> None:
        self._has_stopped = True
        stop_rank(about, None, values)

    def report(self) -> bool:
        """Return whether this rank stopped; see `Watch`."""
        return self._has_stopped or (self._blamed is not None and self._blamed.has_stopped)


def stop_rank(about: str, frame: FrameType | None, values: Mapping[str, object]) -> None:
    """Stop this rank in `frame`; by default, in the nearest frame outside of the observing code."""
    multiprocessing_pdb.stop(about, frame=frame or _find_caller(), frame_locals=values)


def _find_caller() -> FrameType:
    """Return the nearest frame outside of the observing code: the training loop or a module's caller."""
    caller = frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith(_INNER):
        if frame.f_back is None:
            return caller
        frame = frame.f_back
    return frame


def has_part(at: StopPoint, program: TrainingProgram) -> bool:
    """Return whether a rank produces the tensor.

    Tensors that belong to neither parameters nor modules are produced by every rank.
    """
    if at.kind not in _IN_PARAMETERS:
        return True
    inside = (at.tensor, at.tensor.rpartition(".")[0]) if at.kind == Kind.OPTIMIZER_STATE else (at.tensor,)
    return any(shard.name in inside or shard.name.startswith(f"{at.tensor}.") for shard in program.shards)


def debug_case(
    case: Case,
    golden: StoredGolden,
    device: torch.device,
    at: StopPoint,
    trace: CollectiveTrace,
    fault: str | None = None,
) -> DebugResult | None:
    """Train and stop at `at`. Return on rank 0 the ranks that stopped, None on other ranks.

    Until it returns, `diff --golden` compares with the golden, and the timeouts of all process groups are
    raised. Collective: all ranks of the default process group.
    """
    expected = read_expected(
        case, golden, at, device
    )  # before `injected(fault)`, which would change the single-device model too
    differing = None
    with ExitStack() as stack:
        multiprocessing_pdb.arm(hold=True)
        stack.callback(multiprocessing_pdb.disarm)
        if at.collective is not None:  # it may be issued while the model is built
            differing = DifferingStop(at.collective, dist.get_rank(), trace, stop_rank)
            stack.enter_context(differing.watching())
        stack.enter_context(injected(fault))
        assemble_program = Assembly(case, device, build_meshes(case.layout, device.type))
        program = (assemble_program if at.place is None else assemble_program.without_graphs())()
        reference = GoldenReference(program, golden, make_bounds(case, golden))
        blamed = None
        if at.place is not None and expected:
            blamed = BlamedStop(case, dist.get_rank(), program, at.place, expected, stop_rank, reference.show)
        watch = StopWatch(at, golden, reference, has_part(at, program), blamed)
        checks = choose_checks(also=case.checks.also, skip=case.checks.skip)
        num_steps = None if differing is not None else max(at.step, 0) + 1
        with closing(watch):
            train_observed(case, golden, program, watch, checks, num_steps=num_steps, reference=reference)
    has_stopped = watch.report() or (differing is not None and differing.has_stopped)
    stopped = gather_on_first(has_stopped)
    if stopped is None:
        return None
    return DebugResult(ranks=tuple(rank for rank, has_stopped in enumerate(stopped) if has_stopped))
