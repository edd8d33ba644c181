"""Diagnosis after a mismatch: rerun up to the first step that differs and gather evidence of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.cases.axes.groups import (
    VALID_TOKENS,
    axis_affects,
    list_degrees,
    list_groups,
    list_loss_counts,
    list_module_counts,
)
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.schema import Case
from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.capture import LIMIT, Capture, Captured, assemble_tensors, find_other_shapes
from moeverify.explain.fitting.components import ComponentSource, find_components
from moeverify.explain.fitting.diagnosis import diagnose, origin_step
from moeverify.explain.fitting.failure import keep_verdict
from moeverify.explain.fitting.first_divergence import Search, StepFindings, find_origins
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.rank_readings import RankReadings
from moeverify.explain.fitting.stale import explains_stale
from moeverify.explain.fitting.wrong_tensor import Key
from moeverify.parallel.regions.local_shard import join_regions
from moeverify.parallel.regions.observer import INITIAL
from moeverify.parallel.regions.region import Indices, Region
from moeverify.results.checks import ZERO_KINDS, CheckName, Kind
from moeverify.results.collective import IssuedCollective
from moeverify.results.factor import Source
from moeverify.results.finding import Finding, note_failure
from moeverify.results.observation import NoValues
from moeverify.results.timeline import Timeline
from moeverify.train.data import MicroBatch, Share, make_batch, whole_share
from moeverify.train.module_taps import Reading, Tap
from moeverify.train.optimizer_kinds import OPTIMIZER
from moeverify.train.program import TrainingProgram, compute_dtype_of, dtype_of
from moeverify.verification.checks.base import Judgement, Role
from moeverify.verification.checks.registry import CHECKS, choose_checks
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.launch.single_rank_world import single_rank_world
from moeverify.verification.worker.observed import train_observed
from moeverify.verification.worker.step_tap import StepTap, read_golden_modules
from moeverify.verification.worker.timeline import (
    RankTimeline,
    find_issued,
    join_timelines,
    list_issued,
    note_timeline,
)

Assemble = Callable[[], TrainingProgram]


@dataclass(frozen=True)
class RankEvidence:
    """Evidence of one rank in the first step that differs.

    `issued` has the collectives inside each module, `timeline` all collectives of the step. `regions` has
    the region of each parameter that this rank holds.
    """

    captured: Sequence[Captured]
    readings: RankReadings
    issued: Mapping[str, tuple[IssuedCollective, ...]]
    regions: Mapping[str, Region]
    timeline: RankTimeline


@dataclass(frozen=True)
class Evidence:
    """Evidence of all ranks in the first step that differs."""

    step: int
    by_rank: Sequence[RankEvidence]

    @property
    def timeline(self) -> Timeline | None:
        """The collectives of all ranks in the step, or None if there are none."""
        return join_timelines(self.step, [each.timeline for each in self.by_rank])


def gather_evidence(
    case: Case,
    golden: StoredGolden,
    judgement: Judgement | None,
    assemble: Assemble,
    trace: CollectiveTrace,
) -> Evidence | None:
    """Return on rank 0 the evidence of all ranks in the first step that differs; None without findings.

    A golden of sketches has no values that evidence could be compared with. Only rank 0 passes `judgement`.
    Collective: all ranks.
    """
    if golden.is_sketched:
        return None
    request: list[Any] = [_make_request(judgement.findings) if judgement is not None else None]
    dist.broadcast_object_list(request)
    if request[0] is None:
        return None
    step, keys = request[0]
    evidence = _rerun(case, golden, assemble(), step, keys, trace)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(evidence, gathered)
    return None if gathered is None else Evidence(step, gathered)


def explain_findings(
    case: Case, golden: StoredGolden, judgement: Judgement, evidence: Evidence | None, device: torch.device
) -> list[Finding]:
    """Return the findings with their causes, or without causes if the diagnosis fails. Rank 0 only."""

    def explain() -> list[Finding]:
        # The single-device model, also one from a user's factory, must not see the ranks of the job.
        with single_rank_world(device):
            return _explain(case, golden, judgement, evidence, device)

    found = keep_verdict(judgement.findings, explain)
    return note_failure(found, NoValues()) if golden.is_sketched else found


def _make_request(findings: Sequence[Finding]) -> tuple[int, list[Key]] | None:
    """Return the first step that differs and the keys of the tensors that are wrong in it."""
    step = origin_step(findings)
    if step is None:
        return None
    wrong = {finding.tensor for finding in findings if finding.step == step}
    return step, [(step, kind, name) for kind in _KINDS for name in sorted(wrong)]


# Kinds of tensors that a training step shows and the diagnosis uses, in the order of the step.
_KINDS = tuple(
    kind
    for check in CHECKS
    if check.role is Role.DIAGNOSED
    for kind in check.kinds
    if kind not in ZERO_KINDS and kind != Kind.LOADED
)


def _rerun(
    case: Case,
    golden: StoredGolden,
    program: TrainingProgram,
    step: int,
    keys: Sequence[Key],
    trace: CollectiveTrace,
) -> RankEvidence:
    capture = Capture(keys)
    micro_batches = program.share.micro_batches(program.num_micro_batches)

    def count() -> int:
        return trace.num_collectives

    tap = Tap(
        program.model,
        len(micro_batches[0].rows),
        len(program.share.positions),
        scale=program.scale,
        limit=LIMIT,
        count=count,
    )
    observer = StepTap(capture, tap, step, count)
    checks = choose_checks(also=case.checks.also)
    train_observed(case, golden, program, observer, checks, num_steps=max(step, 0) + 1)
    observer.close()
    shares = _list_shares(micro_batches, tap.num_passes)
    readings = RankReadings(tap.readings, shares, frozenset(tap.silent))
    regions = join_regions(program.shards)
    issued = list_issued(case, tap, trace)
    timeline = note_timeline(case, trace.since(observer.num_before), tap.spans)
    return RankEvidence(capture.captured, readings, issued, regions, timeline)


def _list_shares(micro_batches: Sequence[Share], num_passes: int) -> list[tuple[Indices, Indices]]:
    """Return (rows, positions) of the micro-batch of each forward pass.

    Empty if there are fewer passes than micro-batches: then passes cannot be mapped to micro-batches. With
    no passes at all, the stages of a pipeline have no common root, and the pipeline itself numbers the
    micro-batches.
    """
    is_known = num_passes == 0 or num_passes >= len(micro_batches)
    return [(share.rows, share.positions) for share in micro_batches] if is_known else []


def _explain(
    case: Case, golden: StoredGolden, judgement: Judgement, evidence: Evidence | None, device: torch.device
) -> list[Finding]:
    if evidence is None:
        return diagnose(judgement.findings, DiagnosisInputs(axes=_make_axes(case)))
    return diagnose(judgement.findings, _make_inputs(case, golden, judgement, evidence, device))


def _make_inputs(
    case: Case, golden: StoredGolden, judgement: Judgement, evidence: Evidence, device: torch.device
) -> DiagnosisInputs:
    step = evidence.step

    def read(key: Key) -> Tensor | None:
        found = golden.keys(key[0])
        name = f"{key[1]}/{key[2]}"
        return golden.whole(key[0], name) if name in found else None

    precision = compute_dtype_of(case.recipe.precision)
    read_right = cache(lambda: read_golden_modules(case.recipe, golden, step, device))
    tensors = assemble_tensors([each.captured for each in evidence.by_rank], read, precision)
    failed = _failed_keys(judgement)
    search = _search(
        case, evidence, read_right, _find_known(judgement, step, has_own_step=case.recipe.step is not None)
    )
    bounds = _find_bounds(judgement)
    return DiagnosisInputs(
        tensors={
            key: replace(tensor, bound=bounds.get(key, 0.0))
            for key, tensor in tensors.items()
            if key in failed and tensor.differs()
        },
        axes=_make_axes(case, _make_whole_batch(case, step)),
        search=search,
        earlier=lambda key: _read_earlier(read, key),
        issued=lambda module, rank: find_issued(evidence.by_rank[rank].issued, module),
        components=_component_source(case, golden, step, device),
        stale=lambda origin: explains_stale(case.recipe, golden, step, origin, device),
        regions=_gather_regions(evidence),
        decays=OPTIMIZER.find(case.recipe.optimizer.name).list_decays(case.recipe.optimizer),
        shapes=find_other_shapes([each.captured for each in evidence.by_rank], read) if step < 0 else {},
        limits=_find_limits(judgement),
    )


def _gather_regions(evidence: Evidence) -> dict[str, dict[int, Region]]:
    found: dict[str, dict[int, Region]] = {}
    for rank, each in enumerate(evidence.by_rank):
        for name, region in each.regions.items():
            found.setdefault(name, {})[rank] = region
    return found


def _make_whole_batch(case: Case, step: int) -> MicroBatch | None:
    """Return the global batch of a step, or None before step 0."""
    if step < 0:
        return None
    recipe = case.recipe
    whole, size = whole_share(recipe.data), recipe.model.vocab_size
    return make_batch(recipe.data, size, recipe.seed, step, whole, torch.device("cpu"))


def _make_axes(case: Case, batch: MicroBatch | None = None) -> Axes:
    sources = [Source(name=name, size=size) for name, size in list_degrees(case).items()]
    counts = [Source(name=name, size=size) for name, size in list_loss_counts(case).items()]
    if batch is not None and not bool(batch.valid.all()):
        counts.append(Source(name=VALID_TOKENS, size=int(batch.valid.sum())))
    inside = [Source(name=name, size=size) for name, size in list_module_counts(case).items()]
    return Axes(
        list_groups(case), sources, lambda axis, tensor: axis_affects(case, axis, tensor), counts, inside
    )


def _read_earlier(read: Callable[[Key], Tensor | None], key: Key) -> Tensor | None:
    """Return the golden's value of a tensor one step earlier."""
    step, kind, name = key
    if step == 0 and kind == Kind.BUFFER:
        return read((INITIAL, Kind.INITIAL_BUFFER, name))
    return read((step - 1, kind, name)) if step > 0 else None


def _find_limits(judgement: Judgement) -> dict[str, float]:
    """Return, for each check, the smallest relative error that it would detect in half of its tensors."""
    return {check.name: check.limits.median for check in judgement.checks if check.limits is not None}


def _failed_keys(judgement: Judgement) -> set[Key]:
    """Return the keys of the tensors that differ from the golden or between replicas."""
    kinds_of = {check.name: check.kinds for check in CHECKS if check.role is Role.DIAGNOSED}
    return {
        (finding.step, kind, finding.tensor)
        for finding in judgement.findings
        if finding.check in kinds_of
        for kind in kinds_of[CheckName(finding.check)] or (finding.kind,)
    }


def _find_bounds(judgement: Judgement) -> dict[Key, float]:
    """Return the bounds of the tensors that differ from the golden."""
    found: dict[Key, float] = {}
    for each in judgement.findings:
        key = (each.step, each.kind, each.tensor)
        found[key] = max(each.bound, found.get(key, 0.0))
    return found


def _component_source(case: Case, golden: StoredGolden, step: int, device: torch.device) -> ComponentSource:
    if step < 0:
        return lambda: None
    return cache(lambda: find_components(case, golden, step, device))


def _find_known(judgement: Judgement, step: int, *, has_own_step: bool) -> StepFindings:
    """Return the results of the checks in a step that the search uses: wrong gradients, loss, noise."""
    found = [each for each in judgement.findings if each.step == step]
    wrong = [each for each in found if each.check == CheckName.GRADIENT]
    return StepFindings(
        gradients=frozenset(each.tensor for each in wrong),
        loss_differs=any(each.kind in (Kind.LOSS, Kind.TOKEN_LOSS) for each in found),
        noise=min((each.bound for each in wrong), default=0.0),
        has_own_step=has_own_step,
    )


def _search(
    case: Case, evidence: Evidence, read_right: Callable[[], list[Reading]], known: StepFindings
) -> Search | None:
    if compute_dtype_of(case.recipe.precision) is torch.bfloat16 or evidence.step == INITIAL:
        return None  # bfloat16 rounding hides the first difference
    readings = read_right()
    plan = MeshPlan.of(case.layout)
    coordinates = {rank: plan.coordinates(rank) for rank in range(len(evidence.by_rank))}
    by_rank, precision = [each.readings for each in evidence.by_rank], dtype_of(case.recipe.precision)
    return find_origins(readings, by_rank, coordinates, case.layout.tp, precision, known)
