"""Causes of findings after a load: tensors kept, moved, exchanged, or from another time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moeverify.explain.fitting.diagnosis import make_origins
from moeverify.explain.fitting.engine import explain_tensors
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered, Zeroed


def diagnose_load(findings: Sequence[Finding], inputs: DiagnosisInputs, step: int) -> list[Finding]:
    """Return the findings with causes: lost tensors first, then wrongly loaded ones, then all that follows.

    `step` is the step that was saved; `inputs.tensors` has the wrongly loaded tensors.
    """
    lost: list[Finding] = []
    loaded: list[Finding] = []
    others: list[Finding] = []
    for finding in findings:
        is_lost = finding.check == CheckName.COVERAGE and finding.step == step
        (lost if is_lost else loaded if finding.check == CheckName.LOADED else others).append(finding)
    first = next((finding.tensor for finding in (*loaded, *lost)), "")
    return [
        *(_explain_lost(finding) for finding in lost),
        *_explain_loaded(loaded, inputs),
        *(finding.model_copy(update={"follows": first}) for finding in others),
    ]


def _explain_lost(finding: Finding) -> Finding:
    subject = Subject(quantity=Quantity.LOADED, tensors=(finding.tensor,))
    explanation = Explanation(cause=Cause.NOT_LOADED, subject=subject, operation=Zeroed(absent=True))
    return finding.model_copy(update={"explanation": explanation, "code": explanation.cause.value})


def _explain_loaded(loaded: Sequence[Finding], inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Yield the findings of loaded tensors in their order; those with one cause follow the worst."""
    causes = explain_tensors(list(inputs.tensors.values()), inputs)
    origins, _ = make_origins(causes, loaded, inputs)
    heads = {
        tensor.name: origin for cause, origin in zip(causes, origins, strict=True) for tensor in cause.tensors
    }
    moved = _find_moved(loaded, heads)
    options: dict[object, str] = {}
    for finding in loaded:
        head = heads.get(finding.tensor)
        if head is None:  # more tensors were wrong than the diagnosis examines
            yield finding
        elif head.tensor != finding.tensor:
            yield finding.model_copy(update={"follows": head.tensor})
        else:
            # If one tensor was read from a wrong place, so were others of its kind. Short shards then lie
            # outside of their tensors and hold unknown values.
            is_unknown = head.explanation is None or isinstance(head.explanation.operation, Altered)
            follows = moved.get(_kind_of(finding.tensor), "") if is_unknown else ""
            option = _find_option(finding)
            if option is not None and is_unknown:
                first = options.setdefault(option, finding.tensor)
                follows = first if first != finding.tensor else ""
            yield head.model_copy(update={"follows": follows})


def _find_option(finding: Finding) -> object:
    """Return a key that is equal for parameters with the same wrong optimizer option; None for tensors."""
    parameter, _, option = finding.tensor.partition(": ")
    return (option, finding.expected, finding.actual) if parameter and option else None


def _find_moved(loaded: Sequence[Finding], heads: Mapping[str, Finding]) -> dict[str, str]:
    """Return, for each kind, the first tensor whose values are in wrong places."""
    moved: dict[str, str] = {}
    for finding in loaded:
        head = heads.get(finding.tensor)
        if head is not None and head.code == Cause.PERMUTATION:
            moved.setdefault(_kind_of(finding.tensor), head.tensor)
    return moved


def _kind_of(name: str) -> str:
    """Return the prefix of a saved tensor's name: weight, buffer or optimizer."""
    return name.partition("/")[0]
