"""Explains initial values: first those that one rule of their shapes explains, then all others."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.engine import DiagnosedCause, explain_tensors, merge_causes
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.scaled_by_shape import find_rules, measure_all
from moeverify.diagnose.wrong_tensor import WrongTensor


def explain_initial_values(tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[DiagnosedCause]:
    """Return the causes of wrong initial values, those that explain most first."""
    _, given = find_rules(measure_all(tensors))
    together = [each.tensor for each in given]
    left = [tensor for tensor in tensors if not any(tensor is each for each in together)]
    causes = explain_tensors(together, inputs) if together else []
    return merge_causes([*causes, *explain_tensors(left, inputs)])
