"""Diagnosis of findings: add causes and places, put the origins first, and mark the findings that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moeverify.explain.fitting.causes_first import put_modules_first
from moeverify.explain.fitting.data_first import ORIGINS, follow, put_data_first
from moeverify.explain.fitting.engine import DiagnosedCause, explain_tensors
from moeverify.explain.fitting.families import family_of, split_moment
from moeverify.explain.fitting.first_divergence import Divergence
from moeverify.explain.fitting.hypotheses.step_counter import is_counter
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.misplaced import explain_shapes
from moeverify.explain.fitting.missing_state import find_missing_state
from moeverify.explain.fitting.place import locate
from moeverify.explain.fitting.recomputed import (
    RECOMPUTED,
    join_alike,
    merge_with_origins,
)
from moeverify.explain.fitting.recomputed_norm import explain_norm
from moeverify.explain.fitting.upstream import doubt_causes
from moeverify.explain.fitting.wrong_tensor import WrongTensor, quantity_of
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.comparable import comparable
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.facts import ClipFacts, GatheredFacts, ShardingFacts
from moeverify.results.finding import Finding
from moeverify.results.observation import HiddenByRounding, Observation
from moeverify.results.operation import Altered, Carried, OwnValues, Rounded, Unreduced, Zeroed
from moeverify.train.module_taps import BACKWARD, FORWARD
from moeverify.verification.checks.base import Role
from moeverify.verification.checks.narrower import name_dtype
from moeverify.verification.checks.registry import CHECKS

_APART = frozenset(check.name for check in CHECKS if check.role is not Role.DIAGNOSED)
_OF_ROUTERS = frozenset({CheckName.ROUTER, CheckName.OBJECTIVE, CheckName.ROUTER_GRADIENT})
_BY_CALLS = frozenset({CheckName.CLIP, CheckName.OPTIMIZER_STEP})
"""Checks without diagnosis whose findings calls in a wrong order nevertheless explain."""

_ROUTING = (Quantity.EXPERT_CHOICE, Quantity.ROUTING_WEIGHT, Quantity.ROUTING_COUNT)
TOTAL = "total"  # the sum of the loss terms, without information of its own
_NORMS = (Quantity.GRADIENT_NORM, Quantity.CLIP_COEFFICIENT)


def origin_step(findings: Sequence[Finding]) -> int | None:
    """Return the first step at which a comparison with the golden failed; None if none failed."""
    return min((finding.step for finding in findings if finding.check not in _APART), default=None)


def is_apart(finding: Finding) -> bool:
    """Return whether the check of a finding explains it by itself."""
    return finding.check in _APART


def diagnose(findings: Sequence[Finding], inputs: DiagnosisInputs) -> list[Finding]:
    """Return the findings with causes, the origins first.

    Each other finding names the origin that it follows.
    """
    found = _put_calls_first(_put_gathered_first(_explain(findings, inputs)))
    return doubt_causes(put_data_first(_put_wrong_ranks_first(found)), inputs)


def _put_wrong_ranks_first(findings: Sequence[Finding]) -> list[Finding]:
    """Put findings of modules on wrong or too many ranks first: these modules affect all later results."""
    first = next((each for each in findings if _is_on_wrong_ranks(each)), None)
    if first is None:
        return list(findings)
    others = [each for each in findings if each is not first]
    made = [each for each in others if each.check not in ORIGINS or each.check == CheckName.CLIP]
    kept = [each for each in others if each not in made]
    return [first, *kept, *(follow(each, first) for each in made)]


def _is_on_wrong_ranks(finding: Finding) -> bool:
    facts = finding.facts
    return isinstance(facts, ShardingFacts) and (facts.is_repeated or facts.is_elsewhere)


def _put_gathered_first(findings: Sequence[Finding]) -> list[Finding]:
    """Put findings of weights that were gathered into wrong places first: outputs depend on them.

    Weights that are wrong in another way may result from an earlier error, and keep their place.
    """
    moved = [each for each in findings if _is_moved(each)]
    if not moved:
        return list(findings)
    first = min(moved, key=lambda each: each.step)
    others = [each for each in findings if each is not first]
    return [
        first,
        *(follow(each, first) if each.step >= first.step and _is_made(each) else each for each in others),
    ]


def _is_moved(finding: Finding) -> bool:
    return isinstance(finding.facts, GatheredFacts) and bool(finding.facts.sources)


def _is_made(finding: Finding) -> bool:
    """Return whether a finding follows from misplaced weights, as all results computed from them do."""
    return finding.check not in ORIGINS or _is_moved(finding)


def _put_calls_first(findings: Sequence[Finding]) -> list[Finding]:
    """Put findings of wrongly ordered calls before the findings from their step on, which follow them."""
    calls = sorted((each for each in findings if each.check == CheckName.CALLS), key=lambda each: each.step)
    others = [each for each in findings if each.check != CheckName.CALLS]
    if not calls:
        return others
    first = calls[0]
    before: list[Finding] = []
    followers: list[Finding] = []
    for each in others:
        if each.step >= first.step and (each.check not in ORIGINS or each.check in _BY_CALLS):
            followers.append(follow(each, first))
        else:
            before.append(each)
    return [*calls, *before, *followers]


def _explain(findings: Sequence[Finding], inputs: DiagnosisInputs) -> list[Finding]:
    missing = find_missing_state(findings)
    if missing:
        identities = {_identity(finding) for finding in missing}
        others = (finding for finding in findings if _identity(finding) not in identities)
        return missing + [other.model_copy(update={"follows": missing[0].tensor}) for other in others]
    step = origin_step(findings)
    apart = join_alike([finding for finding in findings if finding.check in _APART])
    if step is None:
        return [_explain_apart(finding, inputs) for finding in apart]
    first = [finding for finding in findings if finding.step == step and finding.check not in _APART]
    # Some checks, such as margins of choices, compare whole passes and leave no tensor to examine.
    causes = _explain_step(first, inputs) or [DiagnosedCause((), None)]
    origins, explained = make_origins(causes, first, inputs)
    recomputed = [
        explain_norm(finding, finding.facts, inputs) if isinstance(finding.facts, ClipFacts) else finding
        for finding in apart
        if finding.check in RECOMPUTED
    ]
    origins, recomputed = merge_with_origins(origins, recomputed)
    apart = recomputed + [finding for finding in apart if finding.check not in RECOMPUTED]
    unsteady = _list_unsteady(apart, step, inputs)
    followers = [
        finding.model_copy(update={"follows": origins[0].tensor})
        for finding in findings
        if _identity(finding) not in explained
        and finding.check not in ORIGINS
        and not (unsteady and finding.check == CheckName.REPEAT)
    ]
    independent = [
        _follow_absent(_explain_apart(each, inputs), origins) for each in apart if each.check in ORIGINS
    ]
    independent = [_follow_router(each, origins, independent) for each in independent]
    independent = [_follow_unreduced(each, origins) for each in independent]
    late = [origin for origin in origins if origin.follows]
    origins = [origin for origin in origins if not origin.follows]
    return unsteady[:1] + origins + independent + unsteady[1:] + late + followers


def _follow_absent(finding: Finding, origins: Sequence[Finding]) -> Finding:
    """Let missing optimizer state follow from a gradient that no rank has."""
    if finding.check != CheckName.COVERAGE:
        return finding
    for origin in origins:
        absent = tuple(f"{name}." for name in _list_absent(origin))
        if finding.step >= origin.step and finding.tensor.startswith(absent):
            return follow(finding, origin)
    return finding


def _follow_unreduced(finding: Finding, origins: Sequence[Finding]) -> Finding:
    """Let an unused mesh axis follow from gradients that are not reduced over it, which show a line."""
    facts = finding.facts
    if not isinstance(facts, ShardingFacts) or not facts.is_unused:
        return finding
    for origin in origins:
        operation = None if origin.explanation is None else origin.explanation.operation
        if isinstance(operation, Unreduced) and any(facts.axis in each.sources for each in operation.axes):
            return follow(finding, origin)
    return finding


def _follow_router(finding: Finding, origins: Sequence[Finding], independent: Sequence[Finding]) -> Finding:
    """Return a router's self-check as a follower if the router's error is already known.

    A self-check that names an operation stays. One that only names a place would lead because of its large
    error.
    """
    if finding.check not in _OF_ROUTERS or finding.names_operation:
        return finding
    routers = {family_of(each.tensor) for each in independent if each.check == CheckName.ROUTER}
    for origin in origins:
        explanation = origin.explanation
        if explanation is None or not explanation.names_operation or finding.step < origin.step:
            continue
        is_output = explanation.subject.quantity is Quantity.OUTPUT
        if is_output and family_of(explanation.subject.module or "") in routers:
            return follow(finding, origin)
    return finding


def _list_absent(origin: Finding) -> tuple[str, ...]:
    """Return the tensors that no rank has, if this is the cause of an origin."""
    explanation = origin.explanation
    operation = None if explanation is None else explanation.operation
    is_absent = isinstance(operation, Zeroed) and operation.absent
    return explanation.subject.tensors if explanation is not None and is_absent else ()


def _list_unsteady(findings: Sequence[Finding], step: int, inputs: DiagnosisInputs) -> list[Finding]:
    """Return the results that a second run did not reproduce; the first leads the report.

    The search for causes repeats the run up to `step`. If runs differ by then, report this first; if they
    only differ later, return an empty list.
    """
    unsteady = [_explain_apart(each, inputs) for each in findings if each.check == CheckName.REPEAT]
    if not unsteady or unsteady[0].step > step:
        return []
    head, *rest = unsteady
    return [head, *(each.model_copy(update={"follows": head.tensor}) for each in rest)]


def _identity(finding: Finding) -> tuple[str, str, int]:
    return finding.check, finding.tensor, finding.step


def _explain_step(first: Sequence[Finding], inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Return the causes of the first failing step, by the earliest part of the step that failed."""
    failed = _find_failed(first)
    if inputs.shapes:
        return explain_shapes(inputs.shapes, inputs.axes)
    if Quantity.INITIAL_VALUE in failed:
        return explain_tensors(inputs.of_quantity(Quantity.INITIAL_VALUE), inputs)
    if FORWARD in inputs.origins:
        return [_explain_origin(inputs.origins[FORWARD], inputs.of_quantity(Quantity.LOSS), inputs)]
    if failed.intersection(_ROUTING):
        # Counts result from the choice: if both are wrong, the choice is the cause.
        chosen = inputs.of_quantity(Quantity.EXPERT_CHOICE, Quantity.ROUTING_WEIGHT)
        return explain_tensors(chosen or inputs.of_quantity(Quantity.ROUTING_COUNT), inputs)
    causes = _explain_backward(failed, inputs)
    if Quantity.BUFFER in failed:
        buffers = explain_tensors(inputs.of_quantity(Quantity.BUFFER), inputs)
        causes += buffers if failed == {Quantity.BUFFER} else list(filter(_names_change, buffers))
    causes = causes or explain_tensors(inputs.of_quantity(Quantity.TENSOR), inputs)
    return causes or _explain_replicas(first)


def _names_change(cause: DiagnosedCause) -> bool:
    """Return whether a cause of a wrong buffer says more than that its values are other ones.

    If other results are wrong too, a buffer may follow from these, as an average of weights does. Values of a
    narrower dtype say no more: a bias that moves by powers of two has them by chance.
    """
    return cause.explanation is not None and not isinstance(cause.explanation.operation, Altered | Rounded)


def _find_failed(findings: Sequence[Finding]) -> set[Quantity]:
    """Return the quantities that differ from the golden by more than their bounds."""
    return {quantity_of(finding.kind, finding.tensor) for finding in findings if _is_compared(finding)}


def _is_compared(finding: Finding) -> bool:
    """Return whether a finding compares with the golden.

    Findings of replicas compare ranks with each other.
    """
    return bool(finding.kind) and finding.check != CheckName.REPLICAS


def _explain_backward(failed: set[Quantity], inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Return causes in losses, gradients and later quantities, after a right forward pass."""
    if Quantity.GRADIENT in failed:
        # Unexplained gradients stay last: the module where wrong gradients begin says less than a cause.
        causes = explain_tensors(inputs.of_quantity(Quantity.GRADIENT), inputs)
        return put_modules_first([_find_divergence(cause, inputs) for cause in causes], inputs)
    if Quantity.LOSS in failed:
        # The total is the sum of the terms: if a term is wrong, it is the cause.
        losses = inputs.of_quantity(Quantity.LOSS)
        terms = [loss for loss in losses if loss.name != TOTAL]
        return explain_tensors(terms or losses, inputs)
    if failed.intersection(_NORMS):
        # The clip coefficient depends on the norm: if both are wrong, the norm is the cause.
        return explain_tensors(inputs.of_quantity(*_NORMS)[:1], inputs)
    return _explain_optimizer_step(inputs)


def _explain_optimizer_step(inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Return causes in updates and optimizer state, with right gradients."""
    states = inputs.of_quantity(Quantity.OPTIMIZER_STATE)
    counters = [tensor for tensor in states if is_counter(tensor)]
    if counters:
        # The update uses the step counter, so a wrong counter is its cause. Moments do not depend on it.
        causes = explain_tensors([tensor for tensor in states if not is_counter(tensor)], inputs)
        return explain_tensors(counters, inputs) + [cause for cause in causes if _is_carried(cause)]
    causes = explain_tensors([*inputs.of_quantity(Quantity.UPDATE), *states], inputs)
    # The update uses the moments of its parameter: it follows if the step began with wrong moments.
    begun = {
        split_moment(tensor.name)[0] for cause in causes if _is_carried(cause) for tensor in cause.tensors
    }
    left = [cause for cause in causes if cause.explanation is not None]
    for cause in causes:
        others = tuple(each for each in cause.tensors if each.name not in begun)
        if cause.explanation is None and others:
            left.append(replace(cause, tensors=others))
    return left


def _is_carried(cause: DiagnosedCause) -> bool:
    """Return whether a cause is wrong optimizer state at the start of the step."""
    return cause.explanation is not None and isinstance(cause.explanation.operation, Carried)


def _find_divergence(cause: DiagnosedCause, inputs: DiagnosisInputs) -> DiagnosedCause:
    """Add the module where gradients first differ, backward, to gradients that no sum explains."""
    origin = inputs.origins.get(BACKWARD)
    is_rounded = cause.explanation is not None and cause.explanation.cause is Cause.ROUNDING
    if origin is None or not (cause.explanation is None or is_rounded):
        return cause
    found = _explain_origin(origin, cause.tensors, inputs)
    if not is_rounded or found.explanation is None:
        return found
    assert cause.explanation is not None
    subject = cause.explanation.subject.model_copy(update={"module": origin.culprit})
    explanation = cause.explanation.model_copy(update={"subject": subject})
    return replace(cause, explanation=explanation, observations=(*cause.observations, *found.observations))


def _explain_origin(
    origin: Divergence, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs
) -> DiagnosedCause:
    """Return the cause of the first wrong module end, as the explanation of `tensors`."""
    (cause,) = explain_tensors([origin.tensor], inputs)
    assert inputs.search is not None
    seen = inputs.search.observe(origin)
    return replace(cause, tensors=tuple(tensors), observations=(seen, *cause.observations))


def _explain_replicas(first: Sequence[Finding]) -> list[DiagnosedCause]:
    """Return the cause if the only failure is that replicas differ."""
    differing = next((finding for finding in first if finding.check == CheckName.REPLICAS), None)
    if differing is None:
        return []
    axes = differing.place.axes if differing.place is not None else ()
    explanation = Explanation(
        cause=Cause.REPLICAS,
        subject=_subject_of(differing),
        operation=OwnValues(ranks=differing.ranks, axes=axes),
    )
    return [DiagnosedCause((), explanation)]


def _subject_of(finding: Finding) -> Subject:
    quantity = quantity_of(finding.kind, finding.tensor) if finding.kind else Quantity.BUFFER
    return Subject(quantity=quantity, tensors=(finding.tensor,))


def _explain_apart(finding: Finding, inputs: DiagnosisInputs) -> Finding:
    """Add the cause to a finding of a check that compares a run with itself."""
    if isinstance(finding.facts, ClipFacts):
        return finding if finding.explanation is not None else explain_norm(finding, finding.facts, inputs)
    if finding.check == CheckName.REPEAT:
        explanation = Explanation(
            cause=Cause.NONDETERMINISM, subject=_subject_of(finding), operation=Altered()
        )
        return finding.model_copy(update={"explanation": explanation, "code": explanation.cause.value})
    codes: dict[str, Cause] = {CheckName.SHARDING: Cause.LAYOUT, CheckName.PRECISION: Cause.PRECISION}
    code = codes.get(finding.check)
    return finding.model_copy(update={"code": code.value}) if code is not None else finding


def make_origins(
    causes: Sequence[DiagnosedCause], first: Sequence[Finding], inputs: DiagnosisInputs
) -> tuple[list[Finding], set[tuple[str, str, int]]]:
    """Return one finding for each cause, and the identities of these findings."""
    origins: list[Finding] = []
    explained: set[tuple[str, str, int]] = set()
    for cause in causes:
        head = _choose_head(cause, first)
        if _identity(head) in explained:
            continue
        finding = _with_explanation(head, cause)
        origins.append(finding.model_copy(update={"place": locate(finding, cause, inputs)}))
        explained.add(_identity(head))
    return origins, explained


def _choose_head(cause: DiagnosedCause, first: Sequence[Finding]) -> Finding:
    """Return the worst finding of the tensors of a cause, or the first finding of the step."""
    names = {tensor.name for tensor in cause.tensors}
    kinds = {tensor.key[1] for tensor in cause.tensors}
    about = [finding for finding in first if finding.tensor in names]
    members = [finding for finding in about if _is_compared(finding) and finding.kind in kinds] or about
    return max(members, key=lambda finding: comparable(finding.error), default=first[0])


def _with_explanation(head: Finding, cause: DiagnosedCause) -> Finding:
    if cause.explanation is None:
        names = tuple(tensor.name for tensor in cause.tensors) or (head.tensor,)
        seen = (*head.observations, *_note_rounding(cause))
        return head.model_copy(update={"unexplained": names, "observations": seen})
    return head.model_copy(
        update={
            "explanation": cause.explanation,
            "code": cause.explanation.cause.value,
            "rivals": cause.rivals,
            "observations": (*head.observations, *cause.observations),
        }
    )


def _note_rounding(cause: DiagnosedCause) -> list[Observation]:
    """Return a note that rounding may hide the cause, in precisions below float64."""
    precision = cause.subject.precision if cause.subject is not None else torch.float64
    if precision == torch.float64:
        return []
    return [HiddenByRounding(precision=name_dtype(precision))]
