"""Gradient norms that are not the norm of the ranks' own gradients: squares counted zero or several times.

This needs no golden. The squares come from the run itself, so a cause is found far below the bounds that
the golden's noise allows in bfloat16.
"""

from __future__ import annotations

import math

from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.norm_groups import find_miscounted_group
from moeverify.explain.fitting.norm_slices import find_norm_of_slices
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.facts import ClipFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import Operation, Scaled, Unreduced
from moeverify.results.part import WHOLE, Contribution

# Largest error of a squared norm in machine epsilons. Squares are summed within tensors in float32: up to 6
# were measured with embeddings of 4096 elements. A handful of axes allows a wider tolerance than a hundred
# groups.
_OF_ALL, _OF_A_GROUP = 32.0, 8.0


def explain_norm(finding: Finding, facts: ClipFacts, inputs: DiagnosisInputs) -> Finding:
    """Explain a wrong norm by the axis without a sum, or by the parameters that it miscounts.

    A wrong gradient is a cause by itself; then the finding is returned unchanged.
    """
    if facts.is_coefficient or not facts.norms or inputs.of_quantity(Quantity.GRADIENT):
        return finding
    operation = _find_axis(facts, inputs) or _find_count(finding, facts, inputs)
    noise = max(_OF_A_GROUP * facts.eps, 1e-12)
    operation = operation or find_norm_of_slices(facts, inputs.axes, noise=noise)
    if operation is None:
        return finding
    subject = Subject(quantity=Quantity.GRADIENT_NORM, tensors=(finding.tensor,))
    explanation = Explanation(cause=Cause.NORM, subject=subject, operation=operation)
    axes = [source for each in explanation.candidates for source in each.sources]
    if isinstance(operation, Scaled):
        axes += [each.part.group.axis for each in operation.contributions if each.part.group is not None]
    place = finding.place and finding.place.model_copy(
        update={"axes": tuple(dict.fromkeys(filter(None, axes)))}
    )
    return finding.model_copy(update={"explanation": explanation, "place": place})


def _find_axis(facts: ClipFacts, inputs: DiagnosisInputs) -> Operation | None:
    """Return a missing reduction, if the squared norms of each group of an axis add up to the total."""
    total, noise = sum(facts.squares.values()), _OF_ALL * facts.eps
    found = {
        axis: groups
        for axis, groups in inputs.axes.groups.items()
        if any(len({facts.norms[rank] for rank in group}) > 1 for group in groups)
        and all(_is_near(sum(facts.norms[rank] ** 2 for rank in group), total, noise) for group in groups)
    }
    if not found:
        return None
    size = max(len(group) for groups in found.values() for group in groups)
    products = tuple(Product(times=(axis,)) for axis in found)
    return Unreduced(axes=products, num_replicas=size, factor=Factor(value=1.0))


def _find_count(finding: Finding, facts: ClipFacts, inputs: DiagnosisInputs) -> Operation | None:
    """Return how often a norm common to all ranks counts all squares, or the squares of a group."""
    total, noise = sum(facts.squares.values()), _OF_ALL * facts.eps
    if finding.actual is None or not math.isfinite(finding.actual) or len(set(facts.norms)) > 1 or not total:
        return None
    ratio = finding.actual**2 / total
    count = float(round(ratio)) if ratio > 1.0 else 1.0 / max(1.0, round(1.0 / max(ratio, noise, 1e-12)))
    if count != 1.0 and _is_near(ratio, count, noise):
        factor = find_factor(math.sqrt(count), inputs.axes.sources, power=2)
        return Scaled(contributions=(Contribution(part=WHOLE, factor=factor),)) if factor.equals else None
    noise = _OF_A_GROUP * facts.eps
    excess = finding.actual**2 - total
    found = find_miscounted_group(excess, facts.squares, facts.parts, inputs.axes, noise=noise)
    return None if found is None else Scaled(contributions=(found,))


def _is_near(value: float, expected: float, noise: float) -> bool:
    return abs(value - expected) <= max(noise, 1e-12) * expected
