"""Order of causes of wrong gradients: a module's error comes before the gradients that result from it."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.engine import DiagnosedCause
from moeverify.explain.fitting.families import module_of
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Scaled, Unreduced
from moeverify.results.part import WHOLE


def put_modules_first(causes: Sequence[DiagnosedCause], inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Put a module that is known to pass back a wrong gradient before factors that result from it.

    The wrong gradient reaches the parameters of the calling module and of all modules before it. They have
    factors that no integer of the run explains, or, if the module lacks a reduction, partial sums.
    """
    first = next((cause for cause in causes if _tells_module(cause)), None)
    if first is None or first.explanation is None:
        return list(causes)
    names = list(inputs.regions)
    # The order in which a module computes its children is unknown.
    module = first.explanation.subject.module
    inside = module_of(module) or module
    own = [at for at, name in enumerate(names) if name.startswith(f"{inside}.")]
    behind = set(names[: max(own) + 1]) if own else set()
    made = {
        id(cause)
        for cause in causes
        if _comes_of(cause, first) and all(tensor.name in behind for tensor in cause.tensors)
    }
    kept = [cause for cause in causes if cause is not first]
    at = next((at for at, cause in enumerate(kept) if id(cause) in made), None)
    return list(causes) if at is None else [*kept[:at], first, *kept[at:]]


def _tells_module(cause: DiagnosedCause) -> bool:
    """Return whether a cause names an operation of a module in the backward pass."""
    explanation = cause.explanation
    if explanation is None or explanation.subject.quantity is not Quantity.MODULE_GRADIENT:
        return False
    return bool(explanation.subject.module) and explanation.names_operation


def _comes_of(cause: DiagnosedCause, module: DiagnosedCause) -> bool:
    """Return whether gradients lack the same reduction as a module, or have an unexplained common factor."""
    explanation, other = cause.explanation, module.explanation
    if explanation is None or other is None or explanation.subject.module:
        return False
    operation, done = explanation.operation, other.operation
    if isinstance(operation, Unreduced) and isinstance(done, Unreduced):
        return not set(operation.axes).isdisjoint(done.axes)
    if not isinstance(operation, Scaled) or [each.part for each in operation.contributions] != [WHOLE]:
        return False
    return not operation.contributions[0].factor.equals
