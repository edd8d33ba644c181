"""Test of the hypotheses on wrong tensors, and choice of the simplest explanation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeverify.explain.fitting.families import family_of, name_family
from moeverify.explain.fitting.hypotheses import TIERS
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, Scope
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.order import is_left_out
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.explanation import Explanation
from moeverify.results.factor import Factor
from moeverify.results.observation import Observation
from moeverify.results.operation import Altered, Carried, Scaled, Unreduced


@dataclass(frozen=True)
class DiagnosedCause:
    """Wrong tensors with one explanation, or with none.

    `subject` is the tensor that was tested. If it is a module output, it
    is not one of `tensors`. It is None if only a check found the cause, such as replicas that differ.
    `rivals` are other explanations of the same tensors, with at least as many coefficients.
    """

    tensors: tuple[WrongTensor, ...]
    explanation: Explanation | None
    subject: WrongTensor | None = None
    observations: tuple[Observation, ...] = ()
    rivals: tuple[Explanation, ...] = ()


def explain_tensors(tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Return the causes of the wrong tensors of one step, ordered as in `merge_causes`."""
    causes: list[DiagnosedCause] = []
    left = list(tensors)
    for tier in _list_tiers():
        for scope in Scope:
            for group in list(_split(left, scope)):
                found = _explain_group(group, tier, scope, inputs)
                if found is not None:
                    causes.append(found)
                    left = [tensor for tensor in left if not any(tensor is member for member in group)]
    causes += [DiagnosedCause((tensor,), None, tensor) for tensor in left]
    return merge_causes(causes)


def merge_causes(causes: Sequence[DiagnosedCause]) -> list[DiagnosedCause]:
    """Join equal causes. Causes that explain more tensors come first, unexplained tensors last.

    A reduction that is missing for several tensors is one cause. It gets the candidate axes of the tensor
    with the fewest.
    """
    groups: dict[str, list[DiagnosedCause]] = {}
    for cause in causes:
        groups.setdefault(_identify(cause.explanation), []).append(cause)
    joined = [_join(members) for members in groups.values()]
    return sorted(joined, key=lambda cause: (cause.explanation is None, -len(cause.tensors)))


def _list_tiers() -> list[list[Hypothesis]]:
    return [[hypothesis for hypothesis in tier if not is_left_out(hypothesis.name)] for tier in TIERS]


def _split(tensors: Sequence[WrongTensor], scope: Scope) -> Iterator[list[WrongTensor]]:
    """Yield the groups of tensors of a scope. A group never mixes quantities."""
    groups: dict[tuple[str, str], list[WrongTensor]] = {}
    for number, tensor in enumerate(tensors):
        names = {Scope.TOGETHER: "", Scope.FAMILY: family_of(tensor.name), Scope.ALONE: str(number)}
        groups.setdefault((tensor.quantity, names[scope]), []).append(tensor)
    yield from groups.values()


def _explain_group(
    group: Sequence[WrongTensor],
    tier: Sequence[Hypothesis],
    scope: Scope,
    inputs: DiagnosisInputs,
) -> DiagnosedCause | None:
    """Test the hypotheses of a tier on a group at this scope, and return the simplest explanation."""
    explaining: dict[str, Outcome] = {}
    for hypothesis in tier:
        scopes = hypothesis.scopes(group[0].quantity)
        # Test a single tensor only once, at the narrowest scope of the hypothesis.
        if scope not in scopes or (len(group) == 1 and scope is not scopes[-1]):
            continue
        if not all(hypothesis.applies(tensor, inputs) for tensor in group):
            continue
        if any(name in explaining for name in hypothesis.generalizes):
            continue
        if (outcome := hypothesis.test(group, inputs)) is not None:
            explaining[hypothesis.name] = outcome
    if not explaining:
        return None
    best, *rest = sorted(explaining.values(), key=lambda outcome: outcome.num_coefficients)
    rivals = tuple(outcome.explanation for outcome in rest)
    return DiagnosedCause(tuple(group), best.explanation, group[0], best.observations, rivals)


def _join(causes: Sequence[DiagnosedCause]) -> DiagnosedCause:
    """Return one cause for the tensors of several causes with equal explanations."""
    head = min(causes, key=lambda cause: len(cause.explanation.candidates) if cause.explanation else 0)
    tensors = tuple(tensor for cause in causes for tensor in cause.tensors)
    explanation = head.explanation
    if explanation is not None and explanation.subject.tensors and len(causes) > 1:
        names = tuple(dict.fromkeys(name for cause in causes for name in _names_of(cause)))
        subject = explanation.subject.model_copy(update={"tensors": names, "family": name_family(names)})
        explanation = explanation.model_copy(update={"subject": subject})
    return DiagnosedCause(tensors, explanation, head.subject, head.observations, head.rivals)


def _names_of(cause: DiagnosedCause) -> tuple[str, ...]:
    return cause.explanation.subject.tensors if cause.explanation is not None else ()


def _identify(explanation: Explanation | None) -> str:
    """Return a key that is equal for explanations that differ only in their tensors."""
    if explanation is None:
        return ""
    operation = explanation.operation
    if isinstance(operation, Unreduced):
        # Dense tensors leave fewer candidate axes than expert tensors; compare the first axis alone.
        plain = Factor(value=_round(operation.factor).value)
        operation = operation.model_copy(update={"axes": operation.axes[:1], "factor": plain})
    elif isinstance(operation, Scaled):
        rounded = tuple(
            each.model_copy(update={"factor": _round(each.factor)}) for each in operation.contributions
        )
        operation = operation.model_copy(update={"contributions": rounded})
    elif isinstance(operation, Carried) and operation.factor is not None:
        operation = operation.model_copy(update={"factor": _round(operation.factor)})
    # Without a known operation, two wrong tensors have nothing in common: keep their names in the key.
    names = explanation.subject.tensors if isinstance(operation, Altered) else ()
    subject = explanation.subject.model_copy(update={"tensors": names, "family": ""})
    alike = {"operation": operation, "subject": subject, "residual": None}
    return explanation.model_copy(update=alike).model_dump_json()


def _round(factor: Factor) -> Factor:
    return factor.model_copy(update={"value": float(f"{factor.value:.6g}")})
