"""On every rank: train a case under its layout, compare, gather the numbers, and judge them on rank 0."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moeverify.axes.claims import axis_claims
from moeverify.axes.groups import axis_affects
from moeverify.axes.mesh import MeshPlan
from moeverify.case.schema import Case
from moeverify.checks.collectives import judge_trace
from moeverify.checks.consistency import judge_coverage, judge_repeat, judge_replicas, judge_sharding
from moeverify.checks.dtypes import judge_dtypes, tap_dtypes
from moeverify.checks.precision import Seen
from moeverify.collectives.trace import CollectiveTrace
from moeverify.compare.batch import Fingerprints
from moeverify.compare.bounds import Bounds
from moeverify.compare.comparison import Comparison, Entry
from moeverify.compare.judging import Coordinates, Judgement, Key, assemble, judge
from moeverify.faults.injection import injected
from moeverify.golden.store import StoredGolden
from moeverify.layout.observer import INITIAL, Observer
from moeverify.layout.region import Region
from moeverify.parallel.meshes import Meshes, build_meshes
from moeverify.results.checks import UNCOMPARED_KINDS
from moeverify.results.finding import Finding
from moeverify.train.assemble import assemble_parallel
from moeverify.train.loop import train
from moeverify.train.program import Program
from moeverify.train.subjects import subject_of
from moeverify.worker.investigate import conclude, gather_material


def verify_case(
    case: Case, golden: StoredGolden, device: Any, trace: CollectiveTrace, fault: str | None = None
) -> dict[str, Any] | None:
    """Return on rank 0 what the checks say, as JSON data; None on the other ranks.

    Collective: all ranks of the default process group, which has as many ranks as the layout.
    """
    with injected(fault):
        # Made once: runs on the same groups differ in nothing that a group keeps, and groups are dear.
        assemble = _Assembly(case, device, build_meshes(case.layout, device.type))
        observed = _observe(case, golden, assemble, trace)
        judgement = None if observed is None else observed.judgement
        material = gather_material(case, golden, judgement, assemble, trace)
    if observed is None:
        return None
    # What a fault has broken is whole again here: a diagnosis compares with what one device really computes.
    findings = conclude(case, golden, observed.judgement, material, device)
    return {
        "checks": [check.model_dump(mode="json") for check in observed.judgement.checks],
        "findings": [finding.model_dump(mode="json") for finding in findings],
        "losses": observed.losses,
    }


@dataclass(frozen=True)
class _Assembly:
    """Makes this rank's program anew for each run of a case, over the same meshes."""

    case: Case
    device: Any
    meshes: Meshes

    def __call__(self) -> Program:
        gc.collect()  # a model is in cycles of references: else that of the run before would stay beside this one
        return assemble_parallel(self.case.recipe, self.case.layout, self.meshes, self.device)


@dataclass(frozen=True)
class _Observed:
    """What rank 0 knows of a case after its runs; `losses` are (golden, layout) of each step."""

    judgement: Judgement
    losses: list[tuple[float, float]]


def _observe(
    case: Case, golden: StoredGolden, assemble: _Assembly, trace: CollectiveTrace
) -> _Observed | None:
    """Train under the layout and compare; return the judgement on rank 0, None elsewhere."""
    comparison = Comparison(golden)
    seen = _train_watched(case, golden, assemble(), comparison, trace)
    entries = list(comparison.entries())
    differing = None if case.checks.repeat == "never" else _repeat(case, golden, assemble, entries)
    traced = judge_trace(case, trace)
    gathered = gather_on_first((entries, differing, seen))
    if gathered is None or traced is None:
        return None
    found, odd, used = (list(part) for part in zip(*gathered, strict=True))
    return _Observed(judge_all(case, golden, found, odd, traced, used), _losses(found))


def _losses(by_rank: Sequence[Sequence[Entry]]) -> list[tuple[float, float]]:
    """Return (golden, layout) total loss of each step, as the first rank that has it reports it."""
    found: dict[int, tuple[float, float]] = {}
    for entries in by_rank:
        for entry in entries:
            if entry.kind == "loss" and entry.name == "total":
                found.setdefault(entry.step, (entry.difference.expected_at, entry.difference.actual_at))
    return [found[step] for step in sorted(found)]


def _train_watched(
    case: Case, golden: StoredGolden, program: Program, observer: Observer, trace: CollectiveTrace
) -> list[Seen] | None:
    """Train, and return which dtypes were seen on this rank; None where the recipe has only one."""
    tap = tap_dtypes(case, program, observer, trace)
    if tap is None:
        _train(case, golden, program, observer)
        return None
    _train(case, golden, program, tap)
    tap.close()
    return tap.seen


def _train(
    case: Case, golden: StoredGolden, program: Program, observer: Observer, *, num_steps: int | None = None
) -> None:
    train(
        case.recipe,
        program,
        observer,
        golden=golden,
        replay_routing=replays_routing(case),
        forced=case.checks.steps == "forced",
        num_steps=num_steps,
    )


def replays_routing(case: Case) -> bool:
    """Return whether the golden's routing is replayed: where rounding could move a token to another expert."""
    return case.recipe.precision != "float64" and subject_of(case.recipe).can_replay


class BitRecorder:
    """An observer that keeps only the hash of each piece."""

    def begin_step(self, step: int) -> None:
        """Do nothing: steps are told apart by what is observed."""

    def __init__(self) -> None:
        self._keys: list[tuple[Key, bool]] = []
        self._bits = Fingerprints()

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Hash one piece; see `moeverify.layout.observer.Observer`."""
        if kind in UNCOMPARED_KINDS:
            return
        empty = local is None or region.numel == 0
        self._keys.append(((step, kind, name), empty))
        if not empty:
            self._bits.add(local)  # type: ignore[arg-type]

    def hashes(self) -> Iterator[tuple[Key, int | None]]:
        """Yield what was observed, in its order, with the hash of its bits; None where there was nothing."""
        values = iter(self._bits.values().tolist())
        for key, empty in self._keys:
            yield key, None if empty else next(values)


def _repeat(case: Case, golden: StoredGolden, assemble: _Assembly, first: Sequence[Entry]) -> list[Key]:
    """Train once more, over the steps that are repeated, and return what came out with other bits on this rank."""
    recorder = BitRecorder()
    num_steps = _num_repeated(case)
    _train(case, golden, assemble(), recorder, num_steps=num_steps)
    before = [entry for entry in first if entry.step < num_steps]
    differing = []
    for entry, (key, bits) in zip(before, recorder.hashes(), strict=True):
        if bits is not None and entry.state != "absent" and bits != entry.bits:
            differing.append(key)
    return differing


def _num_repeated(case: Case) -> int:
    return {"never": 0, "first_step": 1, "every_step": case.recipe.steps}[case.checks.repeat]


def gather_on_first(value: Any) -> list[Any] | None:
    """Return every rank's value on rank 0, None elsewhere."""
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, gathered)
    return gathered


def judge_all(
    case: Case,
    golden: StoredGolden,
    by_rank: Sequence[Sequence[Entry]],
    repeats: Sequence[Sequence[Key] | None],
    traced: Judgement,
    used: Sequence[Sequence[Seen] | None],
) -> Judgement:
    """Return the verdicts of all checks that the case does not skip, in the order of a training step."""
    plan = MeshPlan.of(case.layout)
    coordinates: Coordinates = {rank: plan.coordinates(rank) for rank in range(len(by_rank))}
    assembled = assemble(by_rank)
    forced = case.checks.steps == "forced" and case.recipe.precision != "float64"
    bounds = Bounds(case.checks.tolerance, case.recipe.precision, golden.noise, forced)
    parts = [
        judge(assembled, bounds, coordinates),
        judge_replicas(assembled, coordinates),
        judge_coverage(assembled, _expected_names(case, golden)),
        judge_sharding(assembled, axis_claims(case, plan)),
    ]
    if case.checks.repeat != "never":
        differing = [(rank, key) for rank, found in enumerate(repeats) for key in found or ()]
        num_repeated = sum(step < _num_repeated(case) for step, _, _ in assembled)
        parts.append(judge_repeat(num_repeated, differing, coordinates))
    parts.append(traced)
    dtypes = judge_dtypes(case, used, coordinates)
    parts += [dtypes] if dtypes is not None else []
    skipped = set(case.checks.skip)

    def narrow(finding: Finding) -> Finding:
        said = finding.coordinates.items()
        kept = {axis: place for axis, place in said if axis_affects(case, axis, finding.tensor)}
        return finding.model_copy(update={"coordinates": kept})

    return Judgement(
        tuple(check for part in parts for check in part.checks if check.name not in skipped),
        tuple(narrow(found) for part in parts for found in part.findings if found.check not in skipped),
    )


def _expected_names(case: Case, golden: StoredGolden) -> Mapping[int, set[tuple[str, str]]]:
    """Return what the golden holds at each step and a run under a layout must show too."""
    unshown = UNCOMPARED_KINDS | ({"router_ids"} if replays_routing(case) else set())
    names: dict[int, set[tuple[str, str]]] = {}
    for step in range(INITIAL, case.recipe.steps):
        pairs = {(kind, name) for kind, _, name in (key.partition("/") for key in golden.keys(step))}
        names[step] = {pair for pair in pairs if pair[0] not in unshown}
    return names
