"""Which cause of wrong gradients comes first, where one is made by what another one says of a module."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.engine import DiagnosedCause
from moeverify.diagnose.families import module_of
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Scaled, Unreduced, Zeroed
from moeverify.results.part import WHOLE


def put_modules_first(causes: Sequence[DiagnosedCause], inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Return the causes, a module that is known to pass back something else before factors that come of it.

    Parameters get factors that nothing names of what it passes back, if they are of the module that calls it or stand
    before that. Of what is not reduced they are partial sums themselves.
    """
    first = next((cause for cause in causes if _tells_module(cause)), None)
    if first is None or first.explanation is None:
        return list(causes)
    names = list(inputs.regions)
    # In which order modules that one calls are computed is not known.
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
    """Return whether a cause says what a module does, on right inputs, in the backward pass."""
    explanation = cause.explanation
    if explanation is None or explanation.subject.quantity is not Quantity.MODULE_GRADIENT:
        return False
    return bool(explanation.subject.module) and explanation.names_operation


def _comes_of(cause: DiagnosedCause, module: DiagnosedCause) -> bool:
    """Return whether gradients are as partial as what a module does makes them, or off by a number of no name."""
    explanation, other = cause.explanation, module.explanation
    if explanation is None or other is None or explanation.subject.module:
        return False
    operation, done = explanation.operation, other.operation
    if isinstance(operation, Unreduced) and isinstance(done, Unreduced):
        return operation.block is None and not set(operation.axes).isdisjoint(done.axes)
    if not isinstance(operation, Scaled) or [each.part for each in operation.contributions] != [WHOLE]:
        return False
    return not operation.contributions[0].factor.equals


def put_cuts_first(causes: Sequence[DiagnosedCause], inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Return the causes, a module that cuts the graph before its own parameters, which get no gradient for that."""
    cuts = inputs.search.cuts if inputs.search is not None else frozenset()
    zeroed = [
        (cause, cause.explanation.subject)
        for cause in causes
        if cause.explanation is not None and isinstance(cause.explanation.operation, Zeroed)
    ]
    first = [id(cause) for cause, subject in zeroed if subject.module in cuts]
    inner = tuple(f"{cut}." for cut in cuts)
    absent = [
        id(cause)
        for cause, subject in zeroed
        if subject.tensors and all(name.startswith(inner) for name in subject.tensors)
    ]
    if not first or not absent:
        return list(causes)
    return sorted(causes, key=lambda cause: (id(cause) not in first, id(cause) not in absent))
