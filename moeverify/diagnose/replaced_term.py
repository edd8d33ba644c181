"""Whether wrong gradients have another formula's term of the loss in the place of the right one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.components import Components
from moeverify.diagnose.fit import Fit, fit_columns
from moeverify.diagnose.hypotheses.linear_fit import knows
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.factor import SAME, is_same
from moeverify.results.part import WHOLE
from moeverify.results.trial import Reason
from moeverify.train.subject import Vector


def find_parts(
    term: str, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs
) -> tuple[Components, Vector] | Reason:
    """Return the parts of the gradients with those of the right term, or why there is nothing to compare."""
    components = inputs.components() if inputs.components is not None else None
    if components is None or not knows(components, tensors) or term not in components.terms:
        return Reason.NO_SUCH_PARTS
    if not all(bool(torch.isfinite(tensor.whole).all()) for tensor in tensors):
        return Reason.NOT_COMPARABLE
    return components, {tensor.name: components.term(term, tensor.name) for tensor in tensors}


def fit_replaced(tensors: Sequence[WrongTensor], right: Vector, other: Vector) -> Fit | None:
    """Return the fit of errors that are another term, once, less the right one; None where they are not."""
    moved = {name: other[name] - right[name] for name in right}
    fit = fit_columns(tensors, [(WHOLE, moved.__getitem__)])
    # The part of a golden counts once by itself, so that what is added once is there twice.
    explains = fit is not None and fit.explains and is_same(fit.coefficients[0], 2.0)
    return fit if explains else None


def fit_multiple_of(tensors: Sequence[WrongTensor], right: Vector, other: Vector) -> tuple[Fit, float] | None:
    """Return the fit and x of errors that are x times another term less the right one; None where they are not."""
    fit = fit_columns(tensors, [(WHOLE, other.__getitem__), (WHOLE, right.__getitem__)])
    if fit is None or not fit.explains or len(fit.coefficients) < 2 or abs(fit.coefficients[1]) > SAME:
        return None
    return fit, fit.coefficients[0] - 1.0
