"""Hypothesis: initial values are a number of times the right ones, as of a deviation that a shard's sizes give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moeverify.axes.groups import BOTH_FANS, BRANCHES, HALVES, LAYERS, WEIGHT_COLUMNS, WEIGHT_ROWS
from moeverify.axes.named_numbers import INIT_STD, LAYER
from moeverify.diagnose.factors import find_factor, find_root
from moeverify.diagnose.families import number_layer
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.named_numbers import NamedNumbers, list_expected, name_factor
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor, Product, Source
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE, Contribution

_FEWEST = 4
"""Elements that are not zero: of fewer, a number of times their values is as well some other values."""


_OF_SUMS = 1e-13
"""Relative: what sums in float64 leave of the fitted number."""


class ScaledValues(Hypothesis):
    """Each element is one number of times the right one, up to the rounding of both to the dtype of the weights.

    A deviation that is one over the root of a fan-in is larger by the root of an axis where that divides the fan-in
    and the shard's own is taken.
    """

    name = "scaled_values"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    own_scopes = (Scope.TOGETHER, Scope.FAMILY, Scope.ALONE)
    """All that is wrong, which one deviation may explain, and each alone."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit one number on all elements, and look at each."""
        value = measure_scale(tensors)
        if value is None:
            return self.refuse()
        sources = [*inputs.sources_of(tensors), *_list_sizes(tensors, inputs)]
        factor = _name_further(_name(value, sources, error=find_error(tensors)), tensors, inputs)
        operation = Scaled(contributions=(Contribution(part=WHOLE, factor=factor),))
        return self.accept(explain_by(Cause.SCALE, operation, tensors, inputs))


def measure_scale(tensors: Sequence[WrongTensor]) -> float | None:
    """Return the number of times that all elements are there, None where they are not or too few tell it."""
    products = sum(float((tensor.expected * tensor.whole).sum()) for tensor in tensors)
    squares = sum(float(tensor.expected.square().sum()) for tensor in tensors)
    if not squares or not all(_has_values(tensor) for tensor in tensors):
        return None
    value = products / squares
    return value if value > 0.0 and all(_is_scaled(tensor, value) for tensor in tensors) else None


def _list_sizes(tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Source]:
    """Return the sizes, or their roots, by which initial values are commonly scaled.

    Projections back into the residual stream are divided by the root of its branches, two a layer (GPT-2), other
    weights by the root of a fan-in or of both fans.
    """
    [layers] = [each.size for each in inputs.axes.counts_of(tensors[0].name) if each.name == LAYERS] or [0]
    sizes = {BRANCHES: 2 * layers, LAYERS: layers}
    shapes = {tuple(tensor.expected.shape[-2:]) for tensor in tensors}
    if len(shapes) == 1 and len(shape := shapes.pop()) > 1:
        sizes |= {
            WEIGHT_ROWS: shape[0],
            WEIGHT_COLUMNS: shape[1],
            BOTH_FANS: sum(shape),
        }
    return [Source(name=name, size=size) for name, size in sizes.items() if size > 1]


def _name_further(factor: Factor, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Factor:
    """Return the factor with what it is of other numbers of the run, or of quotients of the tensors' own.

    The size of an axis may be such a quotient by chance: then both are candidates.
    """
    shapes = {tuple(tensor.expected.shape[-2:]) for tensor in tensors}
    layers = {number_layer(tensor.name) for tensor in tensors}
    own: dict[str, float] = {}
    if len(shapes) == 1 and len(shape := shapes.pop()) > 1:
        own |= {WEIGHT_ROWS: shape[0], WEIGHT_COLUMNS: shape[1]}
    layer = layers.pop() if len(layers) == 1 else None
    own |= {LAYER: layer + 1} if layer else {}
    numbers, error = inputs.named.of(**own), find_error(tensors)
    expected = (*own, LAYERS)
    if not factor.equals:
        named = name_factor(factor.value, numbers, error=error, first=expected)
        return named or _name_deviation(factor, tensors, inputs) or factor
    quotients = [
        product
        for product in list_expected(factor, numbers, expected, error=error)
        if product.times and product.over
    ]
    return factor.model_copy(update={"equals": (*factor.equals, *quotients[:1])})


def _name_deviation(factor: Factor, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Factor | None:
    """Return the factor where it puts a deviation of the fans, as 1/root of one, in place of the recipe's.

    Of the fans, and of half of them: as of a gain of the root of two, or of the mean of both.
    """
    deviation = inputs.named.options.get(INIT_STD)
    shapes = [tuple(tensor.expected.shape[-2:]) for tensor in tensors]
    if deviation is None or any(len(shape) != 2 for shape in shapes):
        return None
    fans = {WEIGHT_ROWS: {shape[0] for shape in shapes}, WEIGHT_COLUMNS: {shape[1] for shape in shapes}}
    fans[BOTH_FANS] = {sum(shape) for shape in shapes}
    sizes: dict[str, float] = {name: found.pop() for name, found in fans.items() if len(found) == 1}
    # Of a square matrix the mean of both fans is each of them.
    is_square = sizes.get(WEIGHT_ROWS, 0) == sizes.get(WEIGHT_COLUMNS)
    sizes |= {HALVES[name]: size / 2 for name, size in sizes.items() if name != BOTH_FANS or not is_square}
    value = factor.value * deviation
    named = name_factor(value, NamedNumbers(sizes), error=find_error(tensors), first=tuple(sizes))
    if named is None or any(product.times for product in named.equals):
        return None
    over = (INIT_STD,) * named.power
    equals = tuple(Product(over=(*product.over, *over)) for product in named.equals)
    return Factor(value=named.value / deviation, power=named.power, equals=equals)


def _unit_of(tensor: WrongTensor) -> float:
    return float(torch.finfo(tensor.precision).eps)


def find_error(tensors: Sequence[WrongTensor]) -> float:
    """Return by how much the fitted number may be off, relatively: rounding of many elements cancels in their sum."""
    count = sum(int(tensor.expected.count_nonzero()) for tensor in tensors)
    return max(2.0 * _unit_of(tensors[0]) / math.sqrt(count), 1e-9)


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
        allowed = (2.0 * unit + _OF_SUMS) * torch.maximum(actual.abs(), wanted.abs())
        if not bool(((actual - wanted).abs() <= allowed).all()):
            return False
    return not torch.equal(tensor.whole, tensor.expected)


def _name(value: float, sources: Sequence[Source], *, error: float) -> Factor:
    """Return the factor with the axes whose size, or its root, it is, up to an error."""
    for source in sources:
        for power, size in ((1, source.size), (2, source.size)):
            for wanted in (size ** (1.0 / power), size ** (-1.0 / power)):
                if source.size > 1 and abs(value / wanted - 1.0) <= error:
                    return find_factor(wanted, sources, power=power)
    return find_root(value, sources)


HYPOTHESIS = ScaledValues()
