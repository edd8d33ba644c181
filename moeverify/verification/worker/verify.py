"""Verify job: train a case under its layout, compare with the golden, gather and judge on rank 0."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from moeverify.cases.axes.groups import axis_affects
from moeverify.cases.schema import Case
from moeverify.faults.injection import injected
from moeverify.parallel.meshes import Meshes, build_meshes
from moeverify.parallel.regions.observer import INITIAL, Observer
from moeverify.results.bound import Bound, NearChoices
from moeverify.results.checks import UNCOMPARED_KINDS, Kind
from moeverify.results.error_map import ErrorMap
from moeverify.results.explanation import Explanation
from moeverify.results.facts import ComparedFacts
from moeverify.results.finding import Finding
from moeverify.results.load import ExpertLoad
from moeverify.results.operation import OwnValues
from moeverify.results.run import TimePart
from moeverify.results.timeline import Timeline
from moeverify.train.assemble import assemble_parallel
from moeverify.train.program import TrainingProgram
from moeverify.train.schedule import list_rates
from moeverify.train.subjects import replays_routing
from moeverify.verification.checks.base import Check, CheckOutcome, Judgement, RankRun, ShownTensors, Watch
from moeverify.verification.checks.limits import apply_limits
from moeverify.verification.checks.registry import KIND_ORDER, choose_checks
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.compare.assembled import assemble
from moeverify.verification.compare.comparison import ComparedShard, Comparison
from moeverify.verification.compare.gather import gather_on_first
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.jobs import VerifyResult
from moeverify.verification.launch.single_rank_world import single_rank_world
from moeverify.verification.worker.by_sketch import (
    SketchComparison,
    SketchedEntry,
    estimate_entries,
    plain_entry,
)
from moeverify.verification.worker.culprits import (
    Found,
    Recorded,
    agree_on_step,
    choose_share,
    find_culprits,
    lead_with,
    record_origin,
)
from moeverify.verification.worker.error_map import count_choices, list_bounds, map_errors
from moeverify.verification.worker.golden_reference import GoldenReference
from moeverify.verification.worker.investigate import explain_findings, gather_evidence
from moeverify.verification.worker.leftovers import ProcessSettings
from moeverify.verification.worker.load_watch import LoadWatch, sum_load
from moeverify.verification.worker.observed import list_coordinates, make_bounds, train_observed

Reports = Mapping[str, Any]  # by the name of the check


def verify_case(
    case: Case,
    golden: StoredGolden,
    device: torch.device,
    trace: CollectiveTrace,
    fault: str | None = None,
    *,
    report: Callable[[VerifyResult], None] = lambda result: None,
    admit: Callable[[Iterable[DeviceMesh]], None] = lambda meshes: None,
    extend: Callable[[], None] = lambda: None,
    explain_seconds: float = 60.0,
    operators: Path | None = None,
) -> VerifyResult | None:
    """Return on rank 0 the verdicts of the checks and the causes of findings; None on the other ranks.

    `report` gets intermediate results, so that the verdict survives a loss of ranks in later runs:

    - the findings, before the second run that the diagnosis needs; `extend` then asks for more time;
    - the findings with the causes of the hypotheses, before the ranks record a further run;
    - the first wrong place, before repairs are tried.

    `admit` gets the meshes before they are used. `operators` is the file to write the operators of both
    sides to. `explain_seconds` limits the search for the first wrong operation, in seconds; 0 disables it.
    Collective: all ranks of the default process group, which has as many ranks as the layout.
    """
    clock = _Clock()
    with injected(fault):
        # Made once and reused: creating groups is expensive, and they keep no state between runs.
        meshes = build_meshes(case.layout, device.type)
        admit([meshes.data, meshes.dense, meshes.sparse, meshes.loss])
        assemble_program = Assembly(case, device, meshes)
        observed = _observe(case, golden, assemble_program, trace)
        judgement = None if observed is None else observed.judgement
        clock.end("steps and checks")
        if observed is not None and observed.judgement.findings:
            report(_make_result(observed, observed.judgement.findings, clock))
        extend()
        assemble = assemble_program.without_graphs()
        evidence = gather_evidence(case, golden, judgement, assemble.again, trace)
        clock.end("second run")
    # From here on the single device computes the right values: without the fault, and with its own settings.
    assemble.settings.restore()
    explained = None
    if observed is not None:
        findings = explain_findings(case, golden, observed.judgement, evidence, device)
        clock.end("formulas")
        explained = _Explained(observed, findings, clock, None if evidence is None else evidence.timeline)
        if findings:
            report(explained.make(Found()))  # the other ranks wait meanwhile
    recorded = _record(case, golden, judgement, assemble, fault) if explain_seconds else None
    clock.end("record of operators")
    if explained is None:
        return None
    share, tell = explained.shares_in(recorded), explained.tell_by(report)
    found = find_culprits(
        case, golden, recorded, device, explain_seconds, share=share, operators=operators, tell=tell
    )
    clock.end("first wrong operation")
    return explained.make(found)


class _Clock:
    """Wall time of this rank by stage, for those that take at least a hundredth of a second."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._stages: list[TimePart] = []

    def end(self, name: str) -> None:
        """End the stage that began when the previous one ended."""
        seconds, self._last = time.monotonic() - self._last, time.monotonic()
        if seconds >= 0.01:
            self._stages.append(TimePart(name=name, seconds=round(seconds, 3)))

    def read(self) -> tuple[TimePart, ...]:
        """Return the stages so far."""
        return tuple(self._stages)


def _record(
    case: Case, golden: StoredGolden, judgement: Judgement | None, assemble: Assembly, fault: str | None
) -> Recorded | None:
    """Record the programs of all ranks if a result differs. Return them on rank 0, None elsewhere.

    A golden of sketches has no values to align them with. Collective: all ranks.
    """
    if golden.is_sketched:
        return None
    step = agree_on_step(case, judgement)
    if step is None:
        return None
    with injected(fault):
        return record_origin(case, golden, assemble.again, step)


def name_source(finding: Finding) -> Finding:
    """Return a finding whose explanations of initial values name the source of the right values."""
    source = finding.facts.source if isinstance(finding.facts, ComparedFacts) else None
    if source is None or finding.explanation is None:
        return finding

    def name(explanation: Explanation) -> Explanation:
        operation = explanation.operation
        if not isinstance(operation, OwnValues):
            return explanation
        return explanation.model_copy(update={"operation": operation.model_copy(update={"source": source})})

    rivals = tuple(map(name, finding.rivals))
    return finding.model_copy(update={"explanation": name(finding.explanation), "rivals": rivals})


def _make_result(
    observed: _Observed,
    findings: Sequence[Finding],
    clock: _Clock,
    timeline: Timeline | None = None,
    operators: str = "",
) -> VerifyResult:
    return VerifyResult(
        checks=observed.judgement.checks,
        findings=tuple(findings),
        losses=tuple(observed.losses),
        load=observed.load,
        gradient_norms=tuple(observed.gradient_norms),
        learning_rates=tuple(observed.learning_rates),
        timeline=timeline,
        errors=observed.errors,
        bounds=observed.bounds,
        choices=observed.choices,
        operators=operators,
        stages=clock.read(),
    )


@dataclass(frozen=True)
class _Explained:
    """Results of a case on rank 0, with the causes that the hypotheses give to its findings."""

    observed: _Observed
    findings: Sequence[Finding]
    clock: _Clock
    timeline: Timeline | None

    def make(self, found: Found) -> VerifyResult:
        """Return the result of the case with culprits attached."""
        findings = [name_source(finding) for finding in lead_with(self.findings, found)]
        return _make_result(self.observed, findings, self.clock, self.timeline, found.operators)

    def shares_in(self, recorded: Recorded | None) -> Callable[[Found], float]:
        """Return a function of the causes found so far: the share of the time left that repairs may take."""
        return partial(choose_share, self.findings, -1 if recorded is None else recorded.step)

    def tell_by(self, report: Callable[[VerifyResult], None]) -> Callable[[Found], None]:
        """Return a function that reports the result with the culprits found so far."""
        return lambda found: report(self.make(found))


@dataclass(frozen=True)
class Assembly:
    """Factory of new programs of this rank, one for each run of a case, over the same meshes.

    Each run starts with the `settings` of the first: a `parallelize` that sets the default dtype must not
    change the model of the next run.
    """

    case: Case
    device: torch.device
    meshes: Meshes
    settings: ProcessSettings = field(default_factory=ProcessSettings)

    def without_graphs(self) -> Assembly:
        """Return an assembly without CUDA graphs, whose modules hooks can observe."""
        layout = self.case.layout.model_copy(update={"graphs": "none"})
        return replace(self, case=self.case.model_copy(update={"layout": layout}))

    def again(self) -> TrainingProgram:
        """Return the program of a further run, after the memory of the previous one is free."""
        gc.collect()  # reference cycles would keep its model alive
        return self()

    def __call__(self) -> TrainingProgram:
        self.settings.restore()
        return assemble_parallel(self.case.recipe, self.case.layout, self.meshes, self.device)


@dataclass(frozen=True)
class _Observed:
    """Results of a case on rank 0.

    `losses`, `gradient_norms` and `learning_rates` are (golden, layout) pairs, one for each step. `load` is
    the load of the experts. `errors` has the errors of all tensors, if something differs, and `bounds` the
    parts of their bounds, which allow for `choices` near a tie.
    """

    judgement: Judgement
    losses: list[tuple[float, float]]
    gradient_norms: list[tuple[float, float]]
    learning_rates: list[tuple[float, float]]
    load: ExpertLoad | None
    errors: tuple[ErrorMap, ...]
    bounds: tuple[Bound, ...]
    choices: NearChoices | None


def _observe(
    case: Case, golden: StoredGolden, assemble_program: Assembly, trace: CollectiveTrace
) -> _Observed | None:
    """Train under the layout and compare. Return the judgement on rank 0, None elsewhere."""
    device = assemble_program.device
    checks = choose_checks(also=case.checks.also, skip=case.checks.skip)
    comparison = SketchComparison(golden) if golden.is_sketched else Comparison(golden)
    entries: list[ComparedShard | SketchedEntry] = []

    def train_again(observer: Observer, num_steps: int) -> None:
        _train(case, golden, assemble_program.again(), observer, checks, num_steps=num_steps)

    program = assemble_program()
    run = RankRun(
        case,
        trace,
        lambda: list(map(plain_entry, entries)),
        train_again,
        golden.dtypes,
        partial(single_rank_world, device),
    )
    seeing = [check for check in checks if program.run_captured is None or not check.sees_inside]
    watches = {check.name: watch for check in seeing if (watch := check.watch(run, program)) is not None}
    load = LoadWatch(program)
    rates = _train(case, golden, program, comparison, checks, [*watches.values(), load])
    del program  # `train_again` needs its memory
    entries.extend(comparison.entries())
    reports: Reports = {name: watch.report() for name, watch in watches.items()}
    gathered = gather_on_first((entries, reports, load.report()))
    if gathered is None:
        return None
    by_rank = estimate_entries([found for found, _, _ in gathered], golden)
    expert_load = sum_load(case, [copies for _, _, copies in gathered])
    shown = ShownTensors(
        case=case,
        coordinates=list_coordinates(case),
        tensors=assemble(by_rank, KIND_ORDER),
        bounds=make_bounds(case, golden),
        golden_names=list_names(case, golden, range(INITIAL, case.recipe.steps)),
        load=expert_load,
        own_results=golden.own_results,
        dtypes=golden.dtypes,
    )
    outcomes = _judge_each(checks, shown, [report for _, report, _ in gathered])
    judgement = _conclude(case, outcomes)
    return _Observed(
        judgement,
        losses=list_numbers(by_rank, Kind.LOSS),
        gradient_norms=list_numbers(by_rank, Kind.GRADIENT_NORM),
        learning_rates=[*zip(list_rates(case.recipe.optimizer, case.recipe.steps), rates, strict=True)],
        load=expert_load,
        errors=map_errors(outcomes, shown.tensors) if judgement.findings else (),
        bounds=list_bounds(outcomes, shown.tensors, shown.bounds),
        choices=count_choices(case.recipe, golden.noise),
    )


def _train(
    case: Case,
    golden: StoredGolden,
    program: TrainingProgram,
    observer: Observer,
    checks: Sequence[Check[Any]],
    watches: Sequence[Watch[Any]] = (),
    num_steps: int | None = None,
) -> list[float]:
    """Train with the golden as the reference for ranks that stop at a `Tra()` in the user's code."""
    reference = GoldenReference(program, golden, make_bounds(case, golden), waits=True)
    watches = [*watches, reference]
    return train_observed(
        case, golden, program, observer, checks, watches, num_steps=num_steps, reference=reference
    )


def list_names(case: Case, golden: StoredGolden, steps: range) -> dict[int, set[tuple[str, str]]]:
    """Return the (kind, name) pairs in the golden that a run under a layout must show, by step."""
    # With replayed routing the ids are the golden's; tokens that would choose otherwise are shown separately.
    unshown = UNCOMPARED_KINDS | ({Kind.ROUTER_IDS} if replays_routing(case.recipe) else set())
    names: dict[int, set[tuple[str, str]]] = {}
    for step in steps:
        pairs = {(kind, name) for kind, _, name in (key.partition("/") for key in golden.keys(step))}
        names[step] = {pair for pair in pairs if pair[0] not in unshown}
    return names


def list_numbers(by_rank: Sequence[Sequence[ComparedShard]], kind: Kind) -> list[tuple[float, float]]:
    """Return (golden, layout) of each step's total of a kind, such as the loss, from the first rank."""
    found: dict[int, tuple[float, float]] = {}
    for entries in by_rank:
        for entry in entries:
            if entry.kind == kind and entry.name == "total":
                found.setdefault(entry.step, (entry.difference.expected_at, entry.difference.actual_at))
    return [found[step] for step in sorted(found)]


def judge_all(checks: Sequence[Check[Any]], shown: ShownTensors, reports: Sequence[Reports]) -> Judgement:
    """Return the verdicts of all checks that apply. Rank 0 only.

    `reports` has the reports of each rank, by the name of the check.
    """
    return _conclude(shown.case, _judge_each(checks, shown, reports))


def _judge_each(
    checks: Sequence[Check[Any]], shown: ShownTensors, reports: Sequence[Reports]
) -> list[tuple[Check[Any], CheckOutcome]]:
    outcomes: list[tuple[Check[Any], CheckOutcome]] = []
    for check in checks:
        noted = [by_name[check.name] for by_name in reports if check.name in by_name]
        outcome = check.judge(shown, noted)
        if outcome is not None:
            outcomes.append((check, outcome))
    return outcomes


def _conclude(case: Case, outcomes: Sequence[tuple[Check[Any], CheckOutcome]]) -> Judgement:
    found = sorted((each for _, outcome in outcomes for each in outcome.findings), key=lambda each: each.step)
    return Judgement(apply_limits(outcomes), tuple(_narrow(case, each) for each in found))


def _narrow(case: Case, finding: Finding) -> Finding:
    """Return the finding with only the coordinates of axes that its tensor depends on."""
    kept = {
        axis: place for axis, place in finding.coordinates.items() if axis_affects(case, axis, finding.tensor)
    }
    return finding.model_copy(update={"coordinates": kept})
