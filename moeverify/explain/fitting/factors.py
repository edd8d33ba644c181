"""Search for the integers of a run that explain a measured factor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from moeverify.cases.axes.groups import EXPERTS, TOKENS, TOP_K, VALID_TOKENS
from moeverify.results.factor import Factor, Product, Source, is_same

# These depend on other axes (efsdp = dp_shard * cp / ep, ...): a product with them would count an axis
# twice.
_MADE_OF_OTHERS = {"efsdp", "edp"}


def find_factor(
    value: float, sources: Sequence[Source], *, power: int = 1, counts: Sequence[Source] = ()
) -> Factor:
    """Return the factor with all of the simplest products that equal `value` to the `power`.

    Products of one source (ep, 1/ep) come before products of two (ep * cp, ep / cp, 1 / (ep * cp)): with
    enough axes, some longer product equals any small integer, and proves nothing. All sources of equal size
    are named, because the number cannot distinguish them. `counts` are not axes, but are named beside the
    axes: a denominator must not pass for an axis, or the reverse.
    """
    wanted = value**power
    if wanted <= 0.0 or is_same(wanted, 1.0):
        return Factor(value=value, power=power)
    sizes = {source.name: source.size for source in sources if source.size > 1}
    for products in (_list_single(list(sizes)), _list_double(list(sizes))):
        hits = tuple(product for product in products if is_same(product.measure(sizes), wanted))
        if hits:
            return Factor(value=value, power=power, equals=(*hits, *_find_counts(wanted, sizes, counts)))
    return Factor(value=value, power=power, equals=_find_counts(wanted, sizes, counts))


def list_numbers(sources: Sequence[Source], counts: Sequence[Source] = ()) -> list[float]:
    """Return the possible values of a coefficient: 0, 1 and all products that `find_factor` tests."""
    sizes = {source.name: source.size for source in (*counts, *sources) if source.size > 1}
    names = [source.name for source in sources if source.size > 1]
    products = [*_list_single(list(sizes)), *_list_double(names)]
    return sorted({0.0, 1.0, *(product.measure(sizes) for product in products)})


def _find_counts(wanted: float, sizes: Mapping[str, int], counts: Sequence[Source]) -> tuple[Product, ...]:
    """Return the counts or their inverses that equal a factor, except those that are axes.

    Only two products of two counts are tested, which occur in losses: tokens with and without padding,
    either of which may be the divisor, and experts over top_k, the weight of a balance loss.
    """
    known = {**{source.name: source.size for source in counts}, **sizes}
    others = {source.name: source.size for source in counts if source.name not in sizes}
    products = list(_list_single(list(others)))
    if TOKENS in others and VALID_TOKENS in others:
        products += [
            Product(times=(VALID_TOKENS,), over=(TOKENS,)),
            Product(times=(TOKENS,), over=(VALID_TOKENS,)),
        ]
    if EXPERTS in others and TOP_K in known:
        products += [Product(times=(EXPERTS,), over=(TOP_K,)), Product(times=(TOP_K,), over=(EXPERTS,))]
    return tuple(each for each in products if is_same(each.measure(known), wanted))


def _list_single(names: Sequence[str]) -> Iterator[Product]:
    for name in names:
        yield Product(times=(name,))
        yield Product(over=(name,))


def _list_double(names: Sequence[str]) -> Iterator[Product]:
    for first, second in itertools.combinations(names, 2):
        yield Product(times=(first,), over=(second,))
        yield Product(times=(second,), over=(first,))
        if _MADE_OF_OTHERS.isdisjoint((first, second)):
            yield Product(times=(first, second))
            yield Product(over=(first, second))
