"""Check that a second run of the same layout gives the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.results.checks import UNCOMPARED_KINDS, CheckName
from moeverify.results.finding import Finding
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
from moeverify.verification.compare.assembled import Key
from moeverify.verification.compare.batch import BitFingerprints
from moeverify.verification.compare.comparison import ComparedShard


class BitRecorder:
    """An observer that keeps only the hash of each shard."""

    def __init__(self) -> None:
        self._keys: list[tuple[Key, bool]] = []
        self._bits = BitFingerprints()

    def begin_step(self, step: int) -> None:
        """Do nothing: each observation carries its step."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Hash one shard; see `moeverify.parallel.regions.observer.Observer`."""
        if kind in UNCOMPARED_KINDS:
            return
        empty = local is None or region.numel == 0
        self._keys.append(((step, kind, name), empty))
        if not empty:
            self._bits.add(local)  # type: ignore[arg-type]

    def hashes(self) -> Iterator[tuple[Key, int | None]]:
        """Yield the observations in order, with the hash of their bits; None for an empty shard."""
        values = iter(self._bits.values().tolist())
        for key, empty in self._keys:
            yield key, None if empty else next(values)


def find_changed_bits(entries: Sequence[ComparedShard], bits: Sequence[tuple[Key, int | None]]) -> list[Key]:
    """Return the keys of one rank's tensors whose bits differ in another run with the same order."""
    return [
        key
        for entry, (key, other) in zip(entries, bits, strict=True)
        if other is not None and entry.state != "absent" and other != entry.bits
    ]


def make_findings(check: CheckName, shown: ShownTensors, by_rank: Sequence[Sequence[Key]]) -> list[Finding]:
    """Return a finding for each tensor whose bits differ on some rank, in the order of the runs."""
    ranks_of: dict[Key, list[int]] = {}
    for rank, keys in enumerate(by_rank):
        for key in keys:
            ranks_of.setdefault(key, []).append(rank)
    return [shown.make_finding(check, key, ranks, error=math.inf) for key, ranks in ranks_of.items()]


class _SecondRun(Watch[list[Key]]):
    """Runs the layout again after the first run, and reports tensors whose bits differ."""

    def __init__(self, run: RankRun, num_steps: int) -> None:
        self._run = run
        self._num_steps = num_steps

    def report(self) -> list[Key]:
        recorder = BitRecorder()
        self._run.train_again(recorder, self._num_steps)
        before = [entry for entry in self._run.entries() if entry.step < self._num_steps]
        return find_changed_bits(before, list(recorder.hashes()))


class Repeat(Check[list[Key]]):
    """Bits of a first and a second run. The case sets the number of steps of the second run."""

    name = CheckName.REPEAT
    role = Role.CONSEQUENCE

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[list[Key]] | None:
        """Return a watch that runs the layout again; None if the case does not repeat; see `Check`."""
        num_steps = _count_repeated(run.case.checks.repeat, run.case.recipe.steps)
        return _SecondRun(run, num_steps) if num_steps else None

    def judge(self, shown: ShownTensors, reports: Sequence[list[Key]]) -> CheckOutcome | None:
        """Return the verdict, with a finding for each tensor whose bits differ; see `Check`."""
        if not reports:
            return None
        num_steps = _count_repeated(shown.case.checks.repeat, shown.case.recipe.steps)
        num_tensors = sum(step < num_steps for step, _, _ in shown.tensors)
        return make_outcome(self.name, make_findings(self.name, shown, reports), num_tensors)


def _count_repeated(repeat: str, num_steps: int) -> int:
    return {"never": 0, "first_step": 1, "every_step": num_steps}[repeat]


CHECKS = (Repeat(),)
