"""Place of a cause: its module, ranks, axes and parts, and the collectives issued there."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.explain.fitting.engine import DiagnosedCause
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import quantity_of
from moeverify.results.explanation import Quantity
from moeverify.results.finding import Finding
from moeverify.results.operation import OwnValues, Scaled
from moeverify.results.part import WHOLE
from moeverify.results.place import Place, Stage

_STAGES: Mapping[Quantity, Stage] = {
    Quantity.INITIAL_VALUE: Stage.INITIALIZATION,
    Quantity.OUTPUT: Stage.FORWARD,
    Quantity.EXPERT_CHOICE: Stage.ROUTING,
    Quantity.ROUTING_WEIGHT: Stage.ROUTING,
    Quantity.ROUTING_COUNT: Stage.ROUTING,
    Quantity.LOSS: Stage.LOSS,
    Quantity.GRADIENT: Stage.BACKWARD,
    Quantity.MODULE_GRADIENT: Stage.BACKWARD,
    Quantity.GRADIENT_NORM: Stage.GRADIENT_NORM,
    Quantity.CLIP_COEFFICIENT: Stage.GRADIENT_NORM,
    Quantity.UPDATE: Stage.OPTIMIZER_STEP,
    Quantity.OPTIMIZER_STATE: Stage.OPTIMIZER_STEP,
    Quantity.BUFFER: Stage.STATE,
    Quantity.LOADED: Stage.LOAD,
}
# Tensors of these kinds are named after a parameter or buffer, so a module holds them.
_IN_MODULES = ("initial_weight", "initial_buffer", "gradient", "update", "optimizer_state", "buffer")


def stage_of(finding: Finding) -> Stage | None:
    """Return the part of a training step that computes the tensor of a finding."""
    return _STAGES.get(quantity_of(finding.kind, finding.tensor))


def locate(finding: Finding, cause: DiagnosedCause, inputs: DiagnosisInputs) -> Place:
    """Return the place where the cause of a finding acts."""
    module = _find_module(finding, cause, inputs)
    issued = inputs.issued(module, finding.rank) if module else None
    fields: dict[str, object] = {}
    if cause.subject is not None:
        fields["stage"] = _STAGES.get(cause.subject.quantity)
    if cause.explanation is not None:
        operation = cause.explanation.operation
        fields["stage"] = _STAGES.get(cause.explanation.subject.quantity)
        fields["axes"] = tuple(
            dict.fromkeys(source for each in cause.explanation.candidates for source in each.sources)
        )
        if isinstance(operation, Scaled):
            parts = (each.part for each in operation.contributions)
            fields["parts"] = tuple(part for part in parts if part != WHOLE)
        elif isinstance(operation, OwnValues):
            fields["axes"] = operation.axes
    place = Place(
        module=module,
        ranks=finding.ranks or (finding.rank,),
        issued=issued.collectives if issued is not None else None,
        issued_in=issued.module if issued is not None else "",
    )
    return place.model_copy(update=fields)


def _find_module(finding: Finding, cause: DiagnosedCause, inputs: DiagnosisInputs) -> str:
    """Return the module where the error begins, or the one that holds the parameter."""
    if cause.explanation is not None and cause.explanation.subject.module:
        return cause.explanation.subject.module
    origin = inputs.origin_of(cause.subject) if cause.subject is not None else None
    if origin is not None:
        return origin.culprit
    kind = cause.subject.key[1] if cause.subject is not None else finding.kind
    return finding.tensor.rpartition(".")[0] if kind in _IN_MODULES else ""
