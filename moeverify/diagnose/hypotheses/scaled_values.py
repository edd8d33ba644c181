"""Hypothesis: initial values are a number of times the right ones, as of a deviation that a shard's sizes give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moeverify.axes.named_numbers import FAN_IN, FAN_OUT, LAYER, TWICE_LAYERS
from moeverify.diagnose.factors import find_factor, find_root
from moeverify.diagnose.families import number_layer
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.named_numbers import NamedNumbers, list_expected, name_factor
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor, Source
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE, Contribution

_MATRIX, _MOST_OTHERS = 2, 2
_FEWEST = 4
"""Elements that are not zero: of fewer, a number of times their values is as well some other values."""


class ScaledValues(Hypothesis):
    """Each element is one number of times the right one, up to the rounding of both to the dtype of the weights.

    A deviation that is one over the root of a fan-in is larger by the root of an axis where that divides the fan-in
    and the shard's own is taken.
    """

    name = "scaled_values"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return all that is wrong, which one deviation may explain, and each alone."""
        del quantity
        return (Scope.TOGETHER, Scope.FAMILY, Scope.ALONE)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit one number on all elements, and look at each."""
        products = sum(float((tensor.expected * tensor.whole).sum()) for tensor in tensors)
        squares = sum(float(tensor.expected.square().sum()) for tensor in tensors)
        if not squares or not all(_has_values(tensor) for tensor in tensors):
            return self.refuse()
        value = products / squares
        if not value > 0.0 or not all(_is_scaled(tensor, value) for tensor in tensors):
            return self.refuse()
        factor = _name(value, inputs.sources_of(tensors), unit=_unit_of(tensors[0]))
        numbers, first = _list_numbers(tensors, inputs)
        error = max(_error_of(tensors), 1e-9)
        if not factor.equals:
            factor = name_factor(value, numbers, error=error, first=first) or factor
        else:
            # The size of an axis may be that of a deviation's formula by chance: then both are candidates.
            others = list_expected(factor, numbers, first, error=error)[:_MOST_OTHERS]
            factor = factor.model_copy(update={"equals": (*factor.equals, *others)})
        operation = Scaled(contributions=(Contribution(part=WHOLE, factor=factor),))
        return self.accept(explain_by(Cause.SCALE, operation, tensors, inputs))


def _unit_of(tensor: WrongTensor) -> float:
    return float(torch.finfo(tensor.precision).eps)


def _error_of(tensors: Sequence[WrongTensor]) -> float:
    """Return how far a number that was fitted on all elements may be off by the rounding of each, relatively.

    The error of an element is a third of a unit at most, and those of many add up as their root: four times that.
    """
    return 4.0 * _unit_of(tensors[0]) / math.sqrt(sum(tensor.expected.numel() for tensor in tensors))


def _list_numbers(
    tensors: Sequence[WrongTensor], inputs: DiagnosisInputs
) -> tuple[NamedNumbers, tuple[str, ...]]:
    """Return the numbers of the run with those of these tensors, and which are the simplest of initial values."""
    shapes = {tuple(tensor.expected.shape[-2:]) for tensor in tensors}
    layers = {number_layer(tensor.name) for tensor in tensors}
    own: dict[str, float] = {}
    if len(shapes) == 1 and len(shape := shapes.pop()) == _MATRIX:
        own |= {FAN_OUT: shape[0], FAN_IN: shape[1]}
    layer = layers.pop() if len(layers) == 1 else None
    own |= {LAYER: layer + 1} if layer else {}
    return inputs.named.of(**own), (TWICE_LAYERS, "layers", FAN_IN, FAN_OUT, LAYER)


def _has_values(tensor: WrongTensor) -> bool:
    held = [shard for shard in tensor.shards if shard.region.numel]
    is_whole = all(shard.local is not None and shard.local.numel() == shard.region.numel for shard in held)
    return is_whole and int(tensor.expected.count_nonzero()) >= _FEWEST


def _is_scaled(tensor: WrongTensor, value: float) -> bool:
    """Return whether all elements of all shards are so many times the right ones, and the right ones are others."""
    unit = _unit_of(tensor)
    for shard in tensor.shards:
        if not shard.region.numel:
            continue
        actual, wanted = shard.values(), value * tensor.expected_of(shard)
        # Both were rounded, each by half a unit of its own size, and the product before it was stored.
        allowed = 2.0 * unit * torch.maximum(actual.abs(), wanted.abs())
        if not bool(((actual - wanted).abs() <= allowed).all()):
            return False
    return not torch.equal(tensor.whole, tensor.expected)


def _name(value: float, sources: Sequence[Source], *, unit: float) -> Factor:
    """Return the factor with the axes whose size, or its root, it is, to as many digits as rounding leaves."""
    for source in sources:
        for power, size in ((1, source.size), (2, source.size)):
            for wanted in (size ** (1.0 / power), size ** (-1.0 / power)):
                if source.size > 1 and abs(value / wanted - 1.0) <= max(unit, 1e-9):
                    return find_factor(wanted, sources, power=power)
    return find_root(value, sources)


HYPOTHESIS = ScaledValues()
