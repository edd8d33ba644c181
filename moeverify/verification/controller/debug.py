"""`moeverify run --debug`: trains a case again and stops its ranks at the first finding.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from moeverify.cases.schema import Case
from moeverify.errors import RankFailure
from moeverify.report.words.check import name_differing
from moeverify.report.words.failure import describe_failure
from moeverify.results.checks import Kind
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.facts import CollectiveFacts, Issue, ShardingFacts
from moeverify.results.finding import Finding
from moeverify.results.observation import Direction
from moeverify.results.operation import Altered
from moeverify.results.run import CaseResult
from moeverify.verification.collectives.hang import find_disagreement
from moeverify.verification.controller.goldens import GoldenSet
from moeverify.verification.controller.machine import choose_device
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_folder
from moeverify.verification.controller.search_path import search_path
from moeverify.verification.controller.tasks import Task, make_job, read_outcome, run_tasks
from moeverify.verification.jobs import (
    WORKER,
    BlamedPlace,
    DebugJob,
    DebugResult,
    DifferingCollective,
    Refusal,
    StopPoint,
)
from moeverify.verification.launch.plan import JobOutcome, LaunchEvent

PATIENCE = 7 * 86400.0
"""Time limit of a debugging session in seconds."""

_SHOWN = frozenset(Kind)
# Quantities that a module produces in one call.
_DIRECTIONS: Mapping[Quantity, Direction] = {
    Quantity.OUTPUT: "forward",
    Quantity.MODULE_GRADIENT: "backward",
}


def find_stop(result: CaseResult) -> StopPoint | None:
    """Return the point at which ranks should stop to inspect the first finding, or None.

    The point is a tensor that the ranks compute, or a collective that they issue differently. The latter
    also applies to a run that hung without findings. Findings of a run in a wider precision are skipped:
    they do not occur in this precision.
    """
    if result.verdict == "error":
        return _find_disagreement(result)
    found = [finding for finding in result.findings if _is_made(finding) and not finding.is_of_wider_run]
    first = min(found, key=lambda finding: bool(finding.follows), default=None)
    if first is None:
        return None
    if isinstance(first.facts, CollectiveFacts):
        return _stop_before(first.facts)
    about = f"{first.tensor} at step {first.step}"
    place = find_place(first.explanation, first.step) if first.explanation is not None else None
    return StopPoint(kind=first.kind, tensor=first.tensor, step=first.step, about=about, place=place)


def _is_made(finding: Finding) -> bool:
    """Return whether a finding concerns a tensor or collective on ranks, and not a whole mesh axis."""
    if isinstance(finding.facts, ShardingFacts) and not finding.facts.is_misplaced:
        return False
    return finding.kind in _SHOWN or isinstance(finding.facts, CollectiveFacts)


def _find_disagreement(result: CaseResult) -> StopPoint | None:
    """Return the first collective that ranks issued differently in a run that hung or failed, if any."""
    traces = {report.rank: report.recent for report in result.rank_reports}
    disagreement = find_disagreement(traces)
    if disagreement is None:
        return None
    by_rank = disagreement.by_rank
    record = next(iter(by_rank.values()))
    return _stop_before(
        CollectiveFacts(
            axis=record.axis,
            ranks=record.group,
            number=record.sequence,
            issues=tuple(
                Issue(ranks=(rank,), signature=each.signature, site=each.site)
                for rank, each in by_rank.items()
            ),
            counts=dict.fromkeys(by_rank, record.sequence),
            group=record.group_name,
        )
    )


def _stop_before(facts: CollectiveFacts) -> StopPoint:
    about = f"{name_differing(facts)}, {'in which they differ' if facts.issues else 'up to which they agree'}"
    collective = DifferingCollective(about=about, facts=facts)
    return StopPoint(kind="", tensor="", step=0, about=about, collective=collective)


def find_place(explanation: Explanation, step: int) -> BlamedPlace | None:
    """Return the module call that a cause names, or None."""
    operation, subject = explanation.operation, explanation.subject
    direction = _DIRECTIONS.get(subject.quantity)
    fields: dict[str, Any] = {}
    if direction is not None and subject.module:
        fields = {"direction": direction, "module": subject.module, "inner": subject.inner}
    if isinstance(operation, Altered):
        fields["micro_batch"] = operation.first_micro_batch
    if not fields.get("module"):
        return None
    return BlamedPlace(about=f"{subject.module}, {direction} in step {step}", **fields)


def debug_case(
    case: Case, at: StopPoint, options: RunOptions, on_start: Callable[[], None]
) -> tuple[int, ...]:
    """Train a case until `at`, where its ranks stop, and return the ranks that stopped.

    Return after all ranks have continued and the case has ended. `on_start` is called when the training
    begins.

    Raises: RankFailure when a rank is lost.
    """
    device = choose_device(options.device)
    goldens = GoldenSet.of([case], replace(options, sketch="never"))  # `diff --golden` shows values
    asked = DebugJob(
        case=case,
        golden=goldens.folders[case.name],
        fault=options.case_faults.get(case.name, options.fault),
        search_path=tuple(search_path(case)),
        at=at,
    )
    tasks: list[Task[tuple[int, ...]]] = [
        Task(goldens.job(1), lambda outcome: ()),
        Task(make_job(case.name, case.layout.world_size, PATIENCE, asked), _read_ranks),
    ]

    def on_event(event: LaunchEvent) -> None:
        if event.kind == "start" and event.job == case.name:
            on_start()

    with run_folder(None) as folder:
        answers = run_tasks(
            tasks, entry=WORKER, folder=folder, device=device, backend=options.backend, on_event=on_event
        )
        with closing(answers):
            return tuple(rank for ranks in answers for rank in ranks)


def _read_ranks(outcome: JobOutcome) -> tuple[int, ...]:
    answer = read_outcome(outcome, DebugResult)
    if answer is None:
        raise RankFailure(describe_failure(outcome.failure))
    if isinstance(answer, Refusal):
        raise RankFailure(answer.error)
    return answer.ranks
