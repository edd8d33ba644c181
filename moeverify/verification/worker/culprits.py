"""Search for the first wrong operations: all ranks record the first step that differs, rank 0 searches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from moeverify.cases.axes.groups import list_degrees, list_unions
from moeverify.cases.schema import Case
from moeverify.explain.cause import OperatorCause
from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.fitting.diagnosis import is_apart, origin_step
from moeverify.explain.fitting.failure import describe_failure
from moeverify.explain.fitting.place import stage_of
from moeverify.explain.program import Program
from moeverify.explain.suspects import list_reached
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.culprit import Culprit
from moeverify.results.explanation import Quantity
from moeverify.results.finding import Finding, note_failure
from moeverify.results.observation import DiagnosisFailed, FirstDivergence, ReplicaSum, RightAlike
from moeverify.results.operation import Scaled, Unreduced, Zeroed
from moeverify.results.place import Place
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import Judgement
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.launch.single_rank_world import single_rank_world
from moeverify.verification.worker.operators import keep_operators
from moeverify.verification.worker.recorded import record_one_device, record_ranks

# Finding codes that only name a part of the step. The first wrong operation knows it better.
_PHASES = (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER)

# Finding codes that are kept, since they say more than the kind of the wrong operation.
_KEPT = (Cause.NORM, Cause.REPLICAS)


# Share of the time left for the search behind a measured factor, which stays the cause if no line is found.
_MEASURED_SHARE = 0.25

# Mechanisms that lead, since findings of the same bug name at most the module.
_LEADING = ("race", "overwritten", "dtype")


@dataclass(frozen=True)
class Recorded:
    """Recorded programs of all ranks, up to the step of the first difference. Only rank 0 has them."""

    step: int
    programs: Sequence[Program]


Attributed = Sequence[tuple[Culprit, Sequence[tuple[str, str]]]]
"""Culprits, each with the (kind, tensor) pairs of its wrong results."""


@dataclass(frozen=True)
class Found:
    """Result of the search on rank 0: each culprit with the (kind, tensor) pairs of its wrong results.

    `is_complete`: the culprits are proved and explain all wrong results. `failure` is set if the search
    raised an error. `operators` is the path of the file with the operators of both sides, or empty. `makers`
    has the operation that made each named tensor, where no operation is known to be wrong. `reduced` has the
    modules that compute parts of sums, which a collective then adds up to right values. `places` are the culprits
    that were found before any repair was tried, if the cause was named already. `reached` has the parameters of
    which the backward pass computes a gradient that is not zero.
    """

    step: int = -1
    culprits: Attributed = ()
    is_complete: bool = False
    failure: DiagnosisFailed | None = None
    operators: str = ""
    makers: Mapping[str, Culprit] = field(default_factory=dict)
    reduced: frozenset[str] = frozenset()
    places: Attributed = ()
    reached: frozenset[str] = frozenset()


def agree_on_step(case: Case, judgement: Judgement | None) -> int | None:
    """Return on all ranks the step of the first wrong result, or None if it is not to be recorded.

    If all results are right, but differ in a second run, a race may be seen at that step. Only rank 0 passes
    `judgement`. Below float64 rounding hides the first difference, so nothing is recorded. Collective: all ranks.
    """
    request: list[int | None] = [None]
    if judgement is not None and _is_exact(case):
        step = origin_step(judgement.findings)
        repeated = (each.step for each in judgement.findings if _is_repeated(each))
        request = [min(repeated, default=None) if step is None else step]
    dist.broadcast_object_list(request)
    return request[0]


def _is_repeated(finding: Finding) -> bool:
    """Return whether a finding says that a second run of the same layout differs."""
    return finding.check == CheckName.REPEAT


def record_origin(
    case: Case, golden: StoredGolden, assemble: Callable[[], TrainingProgram], step: int
) -> Recorded | None:
    """Record the programs of all ranks up to the end of `step`. Return them on rank 0, None on other ranks.

    Collective: all ranks.
    """
    programs = record_ranks(case, golden, assemble, step)
    return None if programs is None else Recorded(step, programs)


def _is_exact(case: Case) -> bool:
    return (
        case.recipe.precision == "float64" and case.recipe.float8 == "none" and case.layout.compile == "none"
    )


def find_culprits(
    case: Case,
    golden: StoredGolden,
    recorded: Recorded | None,
    device: torch.device,
    seconds: float,
    *,
    share: Callable[[Found], float] = lambda found: 1.0,
    operators: Path | None = None,
    tell: Callable[[Found], object] = lambda found: None,
) -> Found:
    """Return the first wrong operations that are found within `seconds`.

    Rank 0 alone, without collectives. `share` returns the share of the time left that repairs may take, given
    the causes found so far. If it starts below 1, the first wrong place is found before any repair is tried.
    `operators` is the file to write the operators of both sides to. `tell` is called with the first place
    before any repair is tried, and with the complete result before the operators are compared. Errors are not
    raised: they are returned in `Found.failure`, with the culprits that were found before.
    """
    if recorded is None:
        return Found()
    found, step = Found(), recorded.step

    def note(causes: Sequence[OperatorCause]) -> Found:
        nonlocal found
        made = [(culprits.make(cause), [target.mark[1:] for target in cause.targets]) for cause in causes]
        is_complete = explainer.is_done and all(culprit.proved for culprit, _ in made)
        found = Found(step, made, is_complete)
        return found

    try:
        end = time.monotonic() + seconds
        with single_rank_world(device):
            one = record_one_device(case.recipe, golden, step, device)
        if not (one.is_complete and all(program.is_complete for program in recorded.programs)):
            return Found()
        explainer = _make_explainer(case, recorded, one)
        culprits = Culprits(explainer, list_degrees(case))
        places: Attributed = ()
        reached = list_reached(recorded.programs, step)
        worth = share(found)
        for proves in (False, True) if worth < 1 else (True,):
            left = (end - time.monotonic()) * (worth if proves else 1.0)
            causes, failure = _explain(explainer, left, lambda first: tell(note(first)), proves=proves)
            traced = _trace(culprits, causes, note(causes))
            reduced = culprits.list_reduced_modules()
            found = replace(found, culprits=traced, places=places, failure=failure)
            found = replace(found, reduced=reduced, reached=reached)
            if failure or not (worth := share(found)):
                break  # else the place refutes the name, or an execution may say more
            places = traced
        found = replace(found, makers=culprits.make_makers())
        if operators is None:
            return found
        tell(found)
        kept = keep_operators(case, explainer, recorded.programs, one, causes, operators, seconds)
        return replace(found, operators=kept)
    except Exception as error:  # keep the verdict and the earlier results
        return replace(found, failure=describe_failure(error))


def _make_explainer(case: Case, recorded: Recorded, one: Program) -> Explainer:
    sizes = sorted({float(size) for size in list_degrees(case).values()} - {1.0})
    scales = [*sizes, *(1 / size for size in sizes)]
    return Explainer(recorded.programs, one, recorded.step, scales, list_unions(case))


def _explain(
    explainer: Explainer, seconds: float, on_place: Callable[[list[OperatorCause]], object], *, proves: bool
) -> tuple[Sequence[OperatorCause], DiagnosisFailed | None]:
    """Return the causes that are found, also those before an error, and the error."""
    try:
        return explainer.explain(seconds, proves=proves, on_place=on_place), None
    except Exception as error:  # what was proved before it counts
        return explainer.causes, describe_failure(error)


def _trace(culprits: Culprits, causes: Sequence[OperatorCause], found: Found) -> Attributed:
    """Return the culprits of causes with the lines from which they may come."""
    pairs = zip(causes, found.culprits, strict=True)
    return [(culprits.trace(culprit, cause), marks) for cause, (culprit, marks) in pairs]


def lead_with(findings: Sequence[Finding], found: Found) -> list[Finding]:
    """Return the findings with culprits attached.

    If a check or hypothesis already names the operation, its finding leads and the culprit is added to its
    evidence. Otherwise the culprit leads, and findings that its repair fixes follow it. A race and a line
    that chooses a narrow dtype always lead. A culprit before the first step leads a finding that only says
    that replicas differ.
    """
    left = list(findings)
    if _keeps_name(findings, found):
        found = replace(found, culprits=found.places, is_complete=False)
    for culprit, marks in reversed(found.culprits):
        left = _leave_out_refuted(left, culprit, found)
        named = _find_named(left, found.step) if culprit.mechanism not in _LEADING else None
        is_better = named is not None and _is_measured(named) and _says_more(culprit, named)
        if named is not None and not is_better and (named.names_operation or not _is_of_start(culprit)):
            left = [each.model_copy(update={"culprit": culprit}) if each is named else each for each in left]
            continue
        lead = named or _find_lead(left, found.step, marks if culprit.proved else ())
        if lead is not None:
            left = _attach(left, lead, culprit, everything=found.is_complete)
    left = _name_maker(left, found.makers)
    return left if found.failure is None else note_failure(left, found.failure)


def _name_maker(findings: Sequence[Finding], makers: Mapping[str, Culprit]) -> list[Finding]:
    """Return the findings; the first one before the first step names the operation that made its tensor."""
    first = next(
        (
            each
            for each in findings
            if not (each.follows or each.culprit) and each.step < 0 and each.tensor in makers
        ),
        None,
    )
    return [
        each.model_copy(update={"culprit": makers[each.tensor]}) if each is first else each
        for each in findings
    ]


def _leave_out_refuted(findings: Sequence[Finding], culprit: Culprit, found: Found) -> list[Finding]:
    """Return the findings; those of the recorded step have no explanation that a culprit refutes."""
    return [_without_refuted(each, culprit, found) if each.step == found.step else each for each in findings]


def _without_refuted(finding: Finding, culprit: Culprit, found: Found) -> Finding:
    """Return a finding without an explanation that the recorded operators refute.

    A module may compute a part of a sum, of its output or of a gradient, which is reduced later. The output is
    then right if the module is one of `reduced`. If the first wrong operation is in no module, such as one of
    the user's optimizer, the backward pass was right. A gradient of zeros whose parameter the pass reaches was lost
    after it.
    """
    explanation = finding.explanation
    if explanation is None:
        return finding
    subject = explanation.subject
    if isinstance(explanation.operation, Zeroed):
        is_reached = not explanation.operation.absent and not found.reached.isdisjoint(subject.tensors)
        direction = "backward" if is_reached else ""
    elif subject.quantity is Quantity.MODULE_GRADIENT:
        direction = "" if culprit.here.module or culprit.here.is_derivative else "backward"
    else:
        is_reduced = isinstance(explanation.operation, Unreduced) and subject.module in found.reduced
        direction = "forward" if is_reduced else ""
    if not direction:
        return finding
    left = tuple(
        each
        for each in finding.observations
        if not isinstance(each, ReplicaSum)
        and not (isinstance(each, FirstDivergence) and each.direction == direction)
    )
    return finding.model_copy(
        update={"explanation": None, "code": "", "rivals": (), "observations": left, "place": None}
    )


def _is_of_start(culprit: Culprit) -> bool:
    """Return whether a culprit acts before the first step, so that it made the first values."""
    return culprit.here.step < 0


def choose_share(findings: Sequence[Finding], step: int, found: Found) -> float:
    """Return the share of the time left that repairs may take: 0 if the cause is named, up to `step`.

    A cause is named if a check or hypothesis names the operation and nothing found refutes it. With culprits,
    a measured factor is no name: many mistakes have it, and an execution may show the line. One that nothing
    explains is none at all.
    """
    named = _find_unrefuted(findings, step, found)
    if named is None or _is_open(named):
        return 1.0
    return _MEASURED_SHARE if found.culprits and _is_measured(named) else 0.0


def _find_unrefuted(findings: Sequence[Finding], step: int, found: Found) -> Finding | None:
    """Return the first finding up to `step` that names the operation, unless a culprit refutes it."""
    left = list(findings)
    for culprit, _ in found.culprits:
        left = _leave_out_refuted(left, culprit, found)
    return _find_named(left, step)


def _keeps_name(findings: Sequence[Finding], found: Found) -> bool:
    """Return whether a measured factor stays the cause: no place refutes it, and no execution shows a line."""
    named = _find_unrefuted(findings, found.step, replace(found, culprits=found.places))
    if named is None or not found.places:
        return False
    return not any(_says_more(culprit, named) for culprit, _ in found.culprits)


def _says_more(culprit: Culprit, measured: Finding) -> bool:
    """Return whether an execution shows the line of a mistake, or a number for a factor that no size explains.

    A factor that nothing explains says less than any line.
    """
    operation = None if measured.explanation is None else measured.explanation.operation
    parts = operation.contributions if isinstance(operation, Scaled) else ()
    is_number = culprit.proved and culprit.mechanism == "number" and culprit.there is not None
    is_line = culprit.here.line is not None and _is_open(measured)
    return (
        culprit.own_line is not None
        or is_line
        or (is_number and not any(each.factor.equals for each in parts))
    )


def _is_measured(finding: Finding) -> bool:
    """Return whether the cause of a finding is a factor that was fitted to the numbers, and not why it is wrong."""
    operation = None if finding.explanation is None else finding.explanation.operation
    return isinstance(operation, Scaled) and not operation.local_means


def _is_open(finding: Finding) -> bool:
    """Return whether a measured factor equals no number of the run, or tensors that are placed alike are right."""
    operation = None if finding.explanation is None else finding.explanation.operation
    if not isinstance(operation, Scaled) or operation.local_means or operation.ranks or operation.loss_scale:
        return False
    factors = [each.factor for each in operation.contributions]
    is_explained = all(each.is_zero or each.is_one or each.equals for each in factors)
    return not is_explained or any(isinstance(seen, RightAlike) for seen in finding.observations)


def _find_named(findings: Sequence[Finding], step: int) -> Finding | None:
    """Return the first finding up to this step that names the wrong operation and has no culprit yet."""
    return next(
        (
            each
            for each in findings
            if _says_what(each) and not each.follows and each.step <= step and each.culprit is None
        ),
        None,
    )


def _says_what(finding: Finding) -> bool:
    """Return whether a finding names the operation, or says that replicas were initialized differently."""
    return finding.names_operation or finding.code == Cause.REPLICAS


def _find_lead(findings: Sequence[Finding], step: int, marks: Sequence[tuple[str, str]]) -> Finding | None:
    """Return the finding that a culprit explains, preferring `marks`, its (kind, tensor) pairs."""
    here = [finding for finding in findings if finding.step == step and not is_apart(finding)]
    here = here or [finding for finding in findings if finding.step == step and _is_repeated(finding)]
    named = [finding for mark in marks for finding in here if (finding.kind, finding.tensor) == mark]
    return next(iter([*named, *(each for each in here if not each.follows), *here]), None)


def _attach(
    findings: Sequence[Finding], lead: Finding, culprit: Culprit, *, everything: bool
) -> list[Finding]:
    """Return the findings with the culprit attached to `lead`, which comes first."""
    is_kept = lead.code in _KEPT or not (culprit.proved or lead.code in _PHASES)
    is_kept &= not culprit.copy_of
    is_kept |= _is_open(lead)  # the line says why the measured factor is wrong
    code = lead.code if lead.code and is_kept else culprit.code
    place = lead.place or Place(module=culprit.here.module, ranks=culprit.ranks, stage=stage_of(lead))
    update = {
        "culprit": culprit.model_copy(update={"leads": True}),
        "follows": "",
        "code": code,
        "place": place,
    }
    first = lead.model_copy(update={**update, "rivals": (), "unexplained": (), "follow_up": None})
    repaired = set(culprit.repaired)
    placed = culprit.results if culprit.proved and culprit.mechanism == "block" else ()

    def follow(each: Finding) -> Finding:
        if each.step < 0 and each.tensor in placed:
            return each.model_copy(update={"follows": lead.tensor})  # such as blocks that no rank holds
        of_race = culprit.mechanism == "race" and _is_repeated(each)
        follows = everything or f"{each.kind}/{each.tensor}" in repaired or each.step > lead.step
        follows = of_race or (follows and not is_apart(each))
        if not (culprit.proved and follows) or each.culprit is not None:
            return each
        return each.model_copy(update={"follows": lead.tensor})

    return [first, *(follow(each) for each in findings if each is not lead)]
