"""A gradient norm made of numbers of parts of the model by another power, sum or root than a norm of order 2.

It is written as the root of a sum of powers: of each parameter, module or layer, or of all together, one number of
its gradient is taken to a power; these are added up, or averaged, and a root is taken. Each step may be otherwise,
and the whole may be divided, or not divided, by a count of the run besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from moeverify.diagnose.families import module_of, number_layer
from moeverify.results.factor import Factor, Source
from moeverify.results.factor import Product as Named
from moeverify.results.facts import ClipFacts
from moeverify.results.norm_powers import NormOfPowers, NormPart, PartNumber

_POWERS = (0.5, 1.0, 2.0, 4.0)
_MOST_NOISE = 2e-5
"""Relative: some thousand formulas would give a norm that is known less well by chance."""

_RIGHT = ("norm", 2.0, 2.0)
Sizes = Mapping[str, tuple[float, float, int]]


def find_powers(
    norm: float | None, facts: ClipFacts, sources: Sequence[Source], *, noise: float
) -> NormOfPowers | None:
    """Return the simplest formula that gives a norm which is the same on all ranks; None where several do or none.

    `sources` are the counts of the run that it may be multiplied or divided by, `noise` is how far it may be off.
    """
    if norm is None or not math.isfinite(norm) or not norm > 0.0 or noise > _MOST_NOISE:
        return None
    if len(set(facts.norms)) > 1 or not facts.sizes:
        return None
    right = math.sqrt(sum(facts.squares.values()))
    found: dict[int, list[NormOfPowers]] = {}
    for operation, value in _list_formulas(facts):
        for factor in (None, *_list_factors(sources)):
            wanted = value * (1.0 if factor is None else factor.value)
            if abs(norm - wanted) <= noise * wanted and abs(right - wanted) > noise * wanted:
                cost = _count(operation) + (0 if factor is None else 2)
                found.setdefault(cost, []).append(operation.model_copy(update={"factor": factor}))
    simplest = found[min(found)] if found else []
    return simplest[0] if len(simplest) == 1 else None


def _list_formulas(facts: ClipFacts) -> Iterator[tuple[NormOfPowers, float]]:
    """Yield all formulas with what they give, each number once for each part that it is of."""
    for part, groups in _list_parts(list(facts.squares)).items():
        for number, values in _measure(groups, facts).items():
            if part == "all":
                for root in (*_POWERS, 0.25):
                    yield _make(part, number, 1.0, root), values[0] ** (1.0 / root)
                continue
            yield _make(part, number, 1.0, 1.0, is_largest=True), max(values)
            for power, root, is_mean in product(_POWERS, _POWERS, (False, True)):
                total = sum(value**power for value in values) / (len(values) if is_mean else 1)
                if total > 0.0:
                    yield _make(part, number, power, root, is_mean=is_mean), total ** (1.0 / root)


def _make(
    part: NormPart,
    number: PartNumber,
    power: float,
    root: float,
    *,
    is_mean: bool = False,
    is_largest: bool = False,
) -> NormOfPowers:
    return NormOfPowers(
        part=part, number=number, power=power, root=root, is_mean=is_mean, is_largest=is_largest
    )


def _list_parts(names: Sequence[str]) -> Mapping[NormPart, list[list[str]]]:
    """Return the parameters by what one number is taken of; all that is in no layer is one part."""
    modules: dict[object, list[str]] = {}
    layers: dict[object, list[str]] = {}
    for name in names:
        modules.setdefault(module_of(name), []).append(name)
        layers.setdefault(number_layer(name), []).append(name)
    parts: dict[NormPart, list[list[str]]] = {"all": [list(names)], "parameter": [[name] for name in names]}
    return parts | {"module": list(modules.values()), "layer": list(layers.values())}


def _measure(groups: Sequence[Sequence[str]], facts: ClipFacts) -> dict[PartNumber, list[float]]:
    """Return of each group of parameters the numbers that its part of a norm may be."""
    found: dict[PartNumber, list[float]] = {}
    for names in groups:
        square = sum(facts.squares[name] for name in names)
        absolute, count = (
            sum(facts.sizes[name][0] for name in names),
            sum(facts.sizes[name][2] for name in names),
        )
        numbers: dict[PartNumber, float] = {
            "norm": math.sqrt(square),
            "absolute": absolute,
            "largest": max(facts.sizes[name][1] for name in names),
            "mean-square": math.sqrt(square / count),
            "mean-absolute": absolute / count,
        }
        for number, value in numbers.items():
            found.setdefault(number, []).append(value)
    return found


def _list_factors(sources: Sequence[Source]) -> Iterator[Factor]:
    """Yield the counts of the run, and one over each; of several that are as large all are named."""
    for size in sorted({source.size for source in sources if source.size > 1}):
        names = [source.name for source in sources if source.size == size]
        yield Factor(value=float(size), equals=tuple(Named(times=(name,)) for name in names))
        yield Factor(value=1.0 / size, equals=tuple(Named(over=(name,)) for name in names))


def _count(operation: NormOfPowers) -> int:
    """Return in how many steps a formula is otherwise, of all parameters the least."""
    number, power, root = _RIGHT
    changes = [
        operation.number != number,
        operation.power != power,
        operation.root != root,
        operation.is_mean,
    ]
    if operation.is_largest:
        return 2 + (operation.number != number)
    if operation.part == "all":  # no sum is taken
        return (operation.number != number) + (operation.root != 1.0)
    return 1 + sum(changes) + (operation.part != "parameter")
