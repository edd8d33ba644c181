"""Check that the model's parameters are the optimizer's tensors, and that checkpoints save live tensors.

In a user's model the weights must also keep their bits from one optimizer step to the next, unless one device
changes them too. No bound shows a cast of all weights of a float64 case whose model computes parts in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.parallel.regions.observer import Named
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import DtypeUse, Keeper, ReboundFacts
from moeverify.results.finding import Finding
from moeverify.results.place import Place, Stage
from moeverify.train.engine import PlainEngine
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    make_outcome,
)
from moeverify.verification.checks.narrower import list_narrower, name_dtype
from moeverify.verification.checks.sampling import find_stride, sample_all

UNSTEADY = (DtypeUse.UNREPRODUCED, "weight")
"""Use and part of a weight that one device changes outside of the optimizer step, among a golden's dtypes."""


@dataclass(frozen=True)
class BoundAnew:
    """A parameter or buffer that a module rebound to another tensor, and the holders of the old one.

    Without holders, its values changed outside of the optimizer step; see `ReboundFacts`.
    """

    step: int
    kind: Kind
    name: str
    error: float
    kept_by: tuple[Keeper, ...] = ()
    rounded_to: str = ""


class ReboundWatch(Watch[list[BoundAnew]]):
    """Records, after each step, the tensors that were rebound in it.

    Buffers are recorded only if a checkpoint `saves` them: otherwise nothing holds the old tensor. With
    `compares`, samples of weights are compared from the end of a step to the optimizer of the next one.
    """

    def __init__(self, program: TrainingProgram, *, saves: bool = False, compares: bool = False) -> None:
        self._program: TrainingProgram | None = program
        self._saves = saves
        self._compares = compares
        self._kept: dict[tuple[str, object], Tensor] = {}
        self._step = -1
        self._found: dict[tuple[Kind, str], BoundAnew] = {}

    def begin_step(self, step: int) -> None:
        """Check the result of the previous step; see `Watch`."""
        self._look()
        self._step = step
        if self._program is not None and self._program.custom_step is not None:
            self._compare()  # it shows its gradients after its step

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Keep samples of a weight, or compare all weights; see `Watch`."""
        self.observe_all(step, kind, [(name, local, region)])

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        """Keep samples of weights, or compare all; see `moeverify.parallel.regions.observer.BulkObserver`."""
        if kind in (Kind.INITIAL_WEIGHT, Kind.WEIGHT) and self._compares:
            held = [
                (name, local, region) for name, local, region in shown if local is not None and region.numel
            ]
            samples = sample_all([(local, find_stride(region)) for _, local, region in held])
            self._kept |= {
                (name, region.key): each for (name, _, region), each in zip(held, samples, strict=True)
            }
        elif kind == Kind.GRADIENT and self._kept:
            self._compare()

    def _compare(self) -> None:
        """Compare the weights with those after the last step, and forget these."""
        assert self._program is not None
        shards = [each for each in self._program.live_shards() if (each.name, each.region.key) in self._kept]
        samples = sample_all([(each.local(), find_stride(each.region)) for each in shards])
        for shard, after in zip(shards, samples, strict=True):
            before = self._kept[shard.name, shard.region.key]
            if before.shape == after.shape and not torch.equal(before, after):
                error = _measure(before, after)
                dtype = _find_rounding(before, after, shard.local().dtype)
                found = BoundAnew(self._step, Kind.WEIGHT, shard.name, error, rounded_to=dtype)
                self._found.setdefault((Kind.WEIGHT, shard.name), found)
        self._kept = {}

    def close(self) -> None:
        """Check the result of the last step and release the model; see `Watch`."""
        self._look()
        self._program = None

    def report(self) -> list[BoundAnew]:
        """Return the rebound tensors, each once; see `Watch`."""
        return list(self._found.values())

    def _look(self) -> None:
        if self._program is None:
            return
        engine = self._program.engine
        trained: set[int] = set()
        if isinstance(engine, PlainEngine) and self._step >= 0:
            trained = {id(each) for group in engine.optimizer.param_groups for each in group["params"]}
        for each in self._program.find_rebound():
            kind = Kind.BUFFER if each.is_buffer else Kind.WEIGHT
            kept_by: list[Keeper] = ["checkpoint"] if self._saves else []
            if id(each.old) in trained and id(each.new) not in trained:
                kept_by.append("optimizer")
            if kept_by:
                found = BoundAnew(self._step, kind, each.name, each.measure_error(), tuple(kept_by))
                self._found.setdefault((kind, each.name), found)


def _measure(before: Tensor, after: Tensor) -> float:
    norm = float(before.norm())
    return float((after - before).norm()) / norm if norm else math.inf


def _find_rounding(before: Tensor, after: Tensor, stored: torch.dtype) -> str:
    """Return the narrowest dtype to which all values were rounded; empty if there is none."""
    for dtype in list_narrower(stored):
        if torch.equal(before.to(dtype).to(before.dtype), after):
            return name_dtype(dtype)
    return ""


class ReboundTensors(Check[list[BoundAnew]]):
    """Identity of every parameter, and in a save of every buffer, with the tensor before the first step.

    The comparison with the golden uses the modules' tensors. This check finds that another tensor is
    trained or saved.
    """

    name = CheckName.REBOUND
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[list[BoundAnew]]:
        """Return a watch that records rebound parameters; see `Check`."""
        case = run.case
        compares = case.recipe.model.reference is None and case.checks.steps != "forced"
        return ReboundWatch(program, compares=compares)

    def judge(self, shown: ShownTensors, reports: Sequence[list[BoundAnew]]) -> CheckOutcome | None:
        """Return a finding for each rebound tensor; None if there are none; see `Check`."""
        by_name: dict[tuple[Kind, str], dict[int, BoundAnew]] = {}
        unsteady = {name for use, name, part in shown.dtypes if (use, part) == UNSTEADY}
        for rank, report in enumerate(reports):
            for each in report:
                if not each.kept_by and each.name in unsteady:
                    continue
                by_name.setdefault((each.kind, each.name), {})[rank] = each
        if not by_name:
            return None
        findings = _follow_first([_make_finding(shown, found) for found in by_name.values()])
        return make_outcome(self.name, findings, len(findings))


def _follow_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; all changes of values follow from the first one in the same step."""
    changes = [each for each in findings if each.facts == ReboundFacts() or each.code == Cause.ROUNDING]
    return [
        each.model_copy(update={"follows": changes[0].tensor})
        if each in changes[1:] and each.step == changes[0].step
        else each
        for each in findings
    ]


def _make_finding(shown: ShownTensors, found: dict[int, BoundAnew]) -> Finding:
    rank = max(found, key=lambda each: found[each].error)
    first = min(found.values(), key=lambda each: each.step)
    return shown.make_finding(
        CheckName.REBOUND,
        (first.step, first.kind, first.name),
        tuple(found),
        rank=rank,
        error=found[rank].error,
        code=Cause.STALE if first.kept_by else Cause.ROUNDING if first.rounded_to else "",
        facts=ReboundFacts(kept_by=first.kept_by, rounded_to=first.rounded_to),
        place=Place(ranks=tuple(found), stage=Stage.OPTIMIZER_STEP if "optimizer" in first.kept_by else None),
    )


CHECKS = (ReboundTensors(),)
