"""Explains initial values: those of one rule of shapes, then all others, then by how the rest is distributed."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.engine import DiagnosedCause, explain_tensors, merge_causes
from moeverify.diagnose.hypotheses.drawn import group_draws, is_common
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.scaled_by_shape import find_rules, measure_all
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.operation import OwnValues


def explain_initial_values(tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Return the causes of wrong initial values, those that explain most first."""
    _, given = find_rules(measure_all(tensors))
    together = [each.tensor for each in given]
    causes = explain_tensors(together, inputs) if together else []
    causes += explain_tensors(_leave_out(tensors, together), inputs)
    # Of these no part is known: they may be drawn otherwise, which many tensors tell together.
    unknown = [
        tensor
        for cause in causes
        if cause.explanation is not None and isinstance(cause.explanation.operation, OwnValues)
        for tensor in cause.tensors
        if is_common(tensor)
    ]
    groups = [members for members, _ in group_draws(unknown, inputs)] if unknown else []
    if groups:
        drawn = [tensor for members in groups for tensor in members]
        others = [cause for cause in causes if not any(_has(cause, tensor) for tensor in drawn)]
        # Causes of several tensors, some of which are drawn so, are told again of the rest.
        rest = [tensor for cause in causes if cause not in others for tensor in cause.tensors]
        causes = [*others, *explain_tensors(_leave_out(rest, drawn), inputs)]
        causes += [cause for members in groups for cause in explain_tensors(members, inputs)]
    return merge_causes(causes)


def _has(cause: DiagnosedCause, tensor: WrongTensor) -> bool:
    return any(tensor is each for each in cause.tensors)


def _leave_out(tensors: Sequence[WrongTensor], others: Sequence[WrongTensor]) -> list[WrongTensor]:
    return [tensor for tensor in tensors if not any(tensor is each for each in others)]
