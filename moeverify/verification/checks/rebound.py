"""Check that the model's parameters are the optimizer's tensors, and that checkpoints save live tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import Keeper, ReboundFacts
from moeverify.results.finding import Finding
from moeverify.results.place import Place, Stage
from moeverify.train.engine import PlainEngine
from moeverify.train.program import Program
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    make_outcome,
)


@dataclass(frozen=True)
class BoundAnew:
    """A parameter or buffer that a module rebound to another tensor, and the holders of the old one."""

    step: int
    kind: Kind
    name: str
    error: float
    kept_by: tuple[Keeper, ...]


class ReboundWatch(Watch[list[BoundAnew]]):
    """Records, after each step, the tensors that were rebound in it.

    Buffers are recorded only if a checkpoint `saves` them: otherwise nothing holds the old tensor.
    """

    def __init__(self, program: Program, *, saves: bool = False) -> None:
        self._program: Program | None = program
        self._saves = saves
        self._step = -1
        self._found: dict[tuple[Kind, str], BoundAnew] = {}

    def begin_step(self, step: int) -> None:
        """Check the result of the previous step; see `Watch`."""
        self._look()
        self._step = step

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


class ReboundTensors(Check[list[BoundAnew]]):
    """Identity of every parameter, and in a save of every buffer, with the tensor before the first step.

    The comparison with the golden uses the modules' tensors. This check finds that another tensor is
    trained or saved.
    """

    name = CheckName.REBOUND
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: Program) -> Watch[list[BoundAnew]]:
        """Return a watch that records rebound parameters; see `Check`."""
        return ReboundWatch(program)

    def judge(self, shown: ShownTensors, reports: Sequence[list[BoundAnew]]) -> CheckOutcome | None:
        """Return a finding for each rebound tensor; None if there are none; see `Check`."""
        by_name: dict[tuple[Kind, str], dict[int, BoundAnew]] = {}
        for rank, report in enumerate(reports):
            for each in report:
                by_name.setdefault((each.kind, each.name), {})[rank] = each
        if not by_name:
            return None
        findings = [_make_finding(shown, found) for found in by_name.values()]
        return make_outcome(self.name, findings, len(findings))


def _make_finding(shown: ShownTensors, found: dict[int, BoundAnew]) -> Finding:
    rank = max(found, key=lambda each: found[each].error)
    first = min(found.values(), key=lambda each: each.step)
    return Finding(
        check=CheckName.REBOUND,
        kind=first.kind,
        tensor=first.name,
        step=first.step,
        rank=rank,
        ranks=tuple(found),
        coordinates=shown.place(rank),
        error=found[rank].error,
        bound=0.0,
        code=Cause.STALE,
        facts=ReboundFacts(kept_by=first.kept_by),
        place=Place(ranks=tuple(found), stage=Stage.OPTIMIZER_STEP if "optimizer" in first.kept_by else None),
    )


CHECKS = (ReboundTensors(),)
