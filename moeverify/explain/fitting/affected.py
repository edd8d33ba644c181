"""Description of the part of the parameters that a finding affects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moeverify.explain.fitting.families import split_moment
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.parameter_parts import find_part
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Quantity
from moeverify.results.finding import Finding
from moeverify.results.operation import Unmoved
from moeverify.results.parameter_part import ParameterPart
from moeverify.results.step_facts import RecomputedFacts

_KINDS: dict[Quantity, tuple[str, ...]] = {
    Quantity.INITIAL_VALUE: (Kind.INITIAL_WEIGHT,),
    Quantity.GRADIENT: (Kind.GRADIENT,),
    Quantity.UPDATE: (Kind.UPDATE, Kind.WEIGHT),
    Quantity.OPTIMIZER_STATE: (Kind.OPTIMIZER_STATE,),
}
_MATRICES = 2
_OF_DECAY = "weight decay"
"""Term of an optimizer step that only matrices have."""


def name_parts(findings: Sequence[Finding], inputs: DiagnosisInputs) -> list[Finding]:
    """Return the findings; those with a cause get the part of the parameters that they affect."""
    return [
        finding if finding.follows else finding.model_copy(update={"part": _find(finding, findings, inputs)})
        for finding in findings
    ]


def _find(finding: Finding, findings: Sequence[Finding], inputs: DiagnosisInputs) -> ParameterPart | None:
    explanation, facts = finding.explanation, finding.facts
    known = [name for name in inputs.regions if _may_be_wrong(name, finding, inputs)]
    if explanation is not None and explanation.subject.quantity in _KINDS and not explanation.subject.module:
        kinds = _KINDS[explanation.subject.quantity]
        affected = {_name_parameter(name, kinds) for name in explanation.subject.tensors}
        if isinstance(explanation.operation, Unmoved):
            affected |= {each.tensor for each in findings if _is_still(each) and each.step == finding.step}
    elif isinstance(facts, RecomputedFacts) and finding.check == CheckName.OPTIMIZER_STEP:
        kinds = (finding.kind,)
        alike = [each for each in findings if each.follows == finding.tensor and each.check == finding.check]
        alike = [each for each in alike if each.step == finding.step and each.kind == finding.kind]
        affected = {_name_parameter(each.tensor, kinds) for each in (finding, *alike)}
        if _is_of_decay(facts):
            known = [name for name in known if _is_matrix(name, inputs)]
    else:
        return None
    # A check of the rank's own values says nothing about errors before it: look at its findings alone.
    same = findings if explanation is not None else [each for each in findings if each.check == finding.check]
    wrong = set(_list_wrong(same, finding.step, kinds)) - set(_list_otherwise(finding, same, kinds))
    unaffected = [name for name in known if name not in wrong and name not in affected]
    doubtful = set(_list_doubtful(finding, findings, kinds)) - affected
    return find_part(affected, unaffected, inputs.regions, inputs.axes.groups, doubtful)


def _list_wrong(findings: Iterable[Finding], step: int, kinds: Sequence[str]) -> Iterable[str]:
    """Yield the parameters with a wrong tensor of these kinds in a step, whatever the cause."""
    for each in findings:
        if each.step == step and each.kind in kinds:
            yield _name_parameter(each.tensor, kinds)


def _list_otherwise(finding: Finding, findings: Sequence[Finding], kinds: Sequence[str]) -> Iterable[str]:
    """Yield the parameters with another known cause in the same step; this cause does not affect them."""
    heads = {each.tensor for each in findings if _is_told_beside(each, finding)}
    for each in findings:
        if each.step == finding.step and each.kind in kinds and (each.follows or each.tensor) in heads:
            names = [*(each.explanation.subject.tensors if each.explanation is not None else ()), each.tensor]
            yield from (_name_parameter(name, kinds) for name in names)


def _list_doubtful(finding: Finding, findings: Sequence[Finding], kinds: Sequence[str]) -> Iterable[str]:
    """Yield the parameters that are wrong in the same step for an unknown reason, possibly for this one."""
    heads = {
        each.tensor
        for each in findings
        if not each.follows and _is_of_step(each, finding) and not _is_told(each)
    }
    for each in findings:
        if _is_of_step(each, finding) and (each.follows or each.tensor) in heads:
            names = [each.tensor, *each.unexplained]
            yield from (_name_parameter(name, kinds) for name in names)


def _is_told_beside(each: Finding, finding: Finding) -> bool:
    """Return whether a finding of the same check and step has another, known cause."""
    if each.follows or each.tensor == finding.tensor:
        return False
    return _is_of_step(each, finding) and _is_told(each)


def _is_of_step(each: Finding, finding: Finding) -> bool:
    """Return whether two findings have the same check, step and kind."""
    return (each.check, each.step, each.kind) == (finding.check, finding.step, finding.kind)


def _is_told(finding: Finding) -> bool:
    """Return whether the cause of a finding is known."""
    facts = finding.facts
    is_made = isinstance(facts, RecomputedFacts) and bool(facts.wrong_terms or facts.is_of_rate)
    return is_made or finding.explanation is not None


def _name_parameter(name: str, kinds: Sequence[str]) -> str:
    return split_moment(name)[0] if Kind.OPTIMIZER_STATE in kinds else name


def _may_be_wrong(name: str, finding: Finding, inputs: DiagnosisInputs) -> bool:
    """Return whether a parameter could show an error: with a zero gradient, a step does not change it."""
    if finding.check == CheckName.INITIAL_STATE or finding.step < 0:
        return True
    gradient = inputs.golden(Kind.GRADIENT, name, 0)
    return gradient is None or bool(gradient.any())


def _is_still(finding: Finding) -> bool:
    return isinstance(finding.facts, RecomputedFacts) and finding.facts.is_still


def _is_of_decay(facts: RecomputedFacts) -> bool:
    """Return whether the weight decay of a result is wrong; vectors have none."""
    return any(term.name == _OF_DECAY for term in facts.wrong_terms)


def _is_matrix(name: str, inputs: DiagnosisInputs) -> bool:
    return len(next(iter(inputs.regions[name].values())).shape) >= _MATRICES
