"""Accumulated gradients that are reduced again in every micro-batch: the collective that weights shares so.

With k ranks and n micro-batches, what micro-batch i adds is multiplied by k in each of the n - 1 - i after it. So it
counts k ** (n - 1 - i) times, and the last one once.
"""

from __future__ import annotations

import math

from moeverify.results.collective import IssuedCollective
from moeverify.results.explanation import Explanation
from moeverify.results.factor import is_same
from moeverify.results.operation import Scaled
from moeverify.results.place import Place

_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")


def name_repeated_reduction(explanation: Explanation, place: Place, numel: int) -> Explanation:
    """Return an explanation by weights of micro-batches with the collective that gives just these weights.

    It ran in the backward pass of the place's module, as often in each micro-batch, over as many ranks as each
    earlier micro-batch counts more often, and on tensors of `numel` elements, as many as the gradient has. Without
    one such collective, or with several, the explanation is as it was.
    """
    operation = explanation.operation
    if not isinstance(operation, Scaled) or place.issued is None or place.issued_in != place.module:
        return explanation
    found = [
        each
        for each in place.issued
        if _gives(each, operation) and {math.prod(shape) for shape in each.shapes} == {numel}
    ]
    if len(found) != 1:
        return explanation
    return explanation.model_copy(
        update={"operation": operation.model_copy(update={"reduced_again": found[0]})}
    )


def _gives(collective: IssuedCollective, operation: Scaled) -> bool:
    """Return whether a collective over accumulated gradients would weight the micro-batches as they are weighted."""
    if collective.direction != "backward" or collective.op not in _REDUCTIONS or len(collective.group) < 2:
        return False
    weights: dict[int, list[float]] = {}
    for each in operation.contributions:
        tokens = each.part.tokens
        if tokens is None or tokens.micro_batch is None or each.part.term:
            return False
        weights.setdefault(tokens.micro_batch, []).append(each.factor.value)
    last = len(weights)  # the micro-batch that counts once, and so is not among the parts that are off
    return (
        sorted(weights) == list(range(last))
        and collective.times % (last + 1) == 0
        and all(
            is_same(value, float(len(collective.group) ** (last - number)))
            for number, values in weights.items()
            for value in values
        )
    )
