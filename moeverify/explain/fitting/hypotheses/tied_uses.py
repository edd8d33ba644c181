"""Hypothesis: the gradient through a use of a tied weight is lost, weighted or not added to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeverify.cases.axes.groups import TIED_USES
from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor, Product, is_same
from moeverify.results.observation import FitResult
from moeverify.results.operation import Scaled, Unreduced
from moeverify.results.part import Contribution, Part

Weights = tuple[float, ...]
"""Coefficient of the gradient through each use."""


class TiedUses(Hypothesis):
    """Each copy of a tied weight has one coefficient for the gradient through each use; the right ones are 1.

    A rank may hold several copies, as for the first and last stage of a pipeline; some of them may be
    right.
    """

    name = "tied_uses"
    quantities = frozenset({Quantity.GRADIENT})
    generalizes = ("detached", "one_factor")

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether the tensor is a weight with several uses."""
        has_uses = any(source.name == TIED_USES for source in inputs.axes.sources_of(tensor.name))
        return super().applies(tensor, inputs) and has_uses

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Fit every copy on the gradients through the uses."""
        (tensor,) = tensors
        by_use = inputs.components().by_use() if inputs.components is not None else {}
        parts = {use: vector[tensor.name] for use, vector in by_use.items() if tensor.name in vector}
        if len(parts) < 2:
            return None
        shards = [shard for shard in tensor.shards if shard.region.numel]
        if not shards or any(shard.local is None for shard in shards):
            return None
        fits = [_fit(shard, parts, tensor) for shard in shards]
        residual = max(left for _, left in fits)
        if not residual <= tensor.exact:
            return None
        # The sum may have reached only some copies: a wrong copy shows the cause.
        found = {weights for weights, _ in fits if set(weights) != {1.0}} or {fits[0][0]}
        if len(found) > 1:
            return self._explain_unsummed(tensor, [weights for weights, _ in fits], residual, inputs)
        sources = inputs.sources_of(tensors)
        contributions = tuple(
            Contribution(part=Part(use=use), factor=find_factor(weight, sources))
            for use, weight in zip(parts, found.pop(), strict=True)
        )
        wrong = tuple(each for each in contributions if not each.is_right) or contributions
        lost = all(each.factor.is_zero for each in wrong)
        cause = Cause.MISSING_REDUCTION if lost else Cause.TERM_SCALE
        explanation = explain_by(cause, Scaled(contributions=wrong), tensors, inputs, residual=residual)
        seen = FitResult(contributions=contributions, residual=residual)
        return Outcome(explanation, (seen,), num_coefficients=len(parts))

    def _explain_unsummed(
        self, tensor: WrongTensor, found: Sequence[Weights], residual: float, inputs: DiagnosisInputs
    ) -> Outcome | None:
        """Explain copies that each have one use, if every use has a copy."""
        single = {
            tuple(float(use == other) for other in range(len(found[0]))) for use in range(len(found[0]))
        }
        if set(found) != single:
            return None
        operation = Unreduced(
            axes=(Product(times=(TIED_USES,)),), num_replicas=len(single), factor=Factor(value=1.0)
        )
        explanation = explain_by(Cause.MISSING_REDUCTION, operation, [tensor], inputs, residual=residual)
        return self.accept(explanation)


def _fit(shard: RankShard, parts: Mapping[str, Tensor], tensor: WrongTensor) -> tuple[Weights, float]:
    """Return the coefficients of the uses in a shard, and the relative residual."""
    columns = torch.stack([shard.region.take(part).flatten() for part in parts.values()], dim=1)
    actual = shard.values().flatten()
    weights = torch.linalg.lstsq(columns, actual.unsqueeze(1), driver="gelsd").solution.flatten()
    left = float((columns @ weights - actual).norm())
    scale = float(tensor.expected_of(shard).norm()) or 1.0
    return tuple(_clean(value) for value in weights.tolist()), left / scale


def _clean(value: float) -> float:
    """Return a coefficient without rounding: the fit leaves about 1e-16 of an absent use."""
    near = next((whole for whole in (0.0, 1.0) if abs(value - whole) < 1e-9 or is_same(value, whole)), None)
    return float(f"{value:.10g}") if near is None else near


HYPOTHESIS = TiedUses()
