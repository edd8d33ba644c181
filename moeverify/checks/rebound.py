"""Whether the parameters of the model are the tensors that the optimizer has, and what a checkpoint saves is live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeverify.checks.base import Check, Outcome, RankRun, Role, Shown, Watch, make_outcome
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import Keeper, ReboundFacts
from moeverify.results.finding import Finding
from moeverify.results.place import Place, Stage
from moeverify.train.engine import PlainEngine
from moeverify.train.program import Program


@dataclass(frozen=True)
class BoundAnew:
    """A parameter or buffer that a module has bound to another tensor in a step, and what keeps the old one."""

    step: int
    kind: Kind
    name: str
    error: float
    kept_by: tuple[Keeper, ...]


class ReboundWatch(Watch[list[BoundAnew]]):
    """Notes after each step what was bound to another tensor in it.

    A buffer is noted where a checkpoint `saves`: else nothing keeps the old one.
    """

    def __init__(self, program: Program, *, saves: bool = False) -> None:
        self._program: Program | None = program
        self._saves = saves
        self._step = -1
        self._found: dict[tuple[Kind, str], BoundAnew] = {}

    def begin_step(self, step: int) -> None:
        """Look at what the step before has left; see `Watch`."""
        self._look()
        self._step = step

    def close(self) -> None:
        """Look at what the last step has left, and let go of the model; see `Watch`."""
        self._look()
        self._program = None

    def report(self) -> list[BoundAnew]:
        """Return what was noted, each tensor once; see `Watch`."""
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
    """Every parameter, and in a save every buffer, is the tensor that it was before the first step.

    Values are compared with the golden as the modules have them: this says that another tensor is trained, or saved.
    """

    name = CheckName.REBOUND
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: Program) -> Watch[list[BoundAnew]]:
        """Return what notes parameters that are bound to another tensor; see `Check`."""
        return ReboundWatch(program)

    def judge(self, shown: Shown, reports: Sequence[list[BoundAnew]]) -> Outcome | None:
        """Return a finding for each tensor, and None where there is none; see `Check`."""
        by_name: dict[tuple[Kind, str], dict[int, BoundAnew]] = {}
        for rank, report in enumerate(reports):
            for each in report:
                by_name.setdefault((each.kind, each.name), {})[rank] = each
        if not by_name:
            return None
        findings = [_make_finding(shown, found) for found in by_name.values()]
        return make_outcome(self.name, findings, len(findings))


def _make_finding(shown: Shown, found: dict[int, BoundAnew]) -> Finding:
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
