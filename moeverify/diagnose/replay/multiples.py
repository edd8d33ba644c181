"""What a number comes from by which a variant multiplies something: twice the bias is once on each rank of tp."""

from __future__ import annotations

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.results.change import Change
from moeverify.results.factor import Factor, Product

_TWICE = "twice"
_MULTIPLES = (_TWICE, "times", "factor", "interpolated")
_SUMS = ("all_reduce", "reduce_scatter")


def name_multiple(change: Change, origin: Origin, inputs: DiagnosisInputs) -> Change:
    """Return a change with the integers of the run that its number equals; one without such a number as it is.

    Of several axes of that size those stay over which ranks sum what is inside of the module, where there are some:
    what each rank adds before a sum counts once for each of them.
    """
    if change.way not in _MULTIPLES:
        return change
    value = 2.0 if change.way == _TWICE else float(change.number or 0.0)
    module = origin.culprit
    factor = find_factor(value, inputs.axes.sources_of(module), counts=inputs.axes.counts_of(module))
    rank = origin.ranks[0] if origin.ranks else 0
    summed = {
        each.axis
        # A dispatcher is no module of its own: what it issues stands at its block.
        for each in inputs.issued(module.removesuffix(".dispatcher"), rank).collectives
        if each.direction == origin.direction and any(name in each.op for name in _SUMS)
    }
    kept = tuple(each for each in factor.equals if _is_one_axis(each) and each.times[0] in summed)
    return change.model_copy(
        update={"factor": Factor(value=value, equals=kept or factor.equals), "is_summed": bool(kept)}
    )


def _is_one_axis(product: Product) -> bool:
    return len(product.times) == 1 and not product.over
