"""How often a loss counts each token, read from what it passes back, and by which averaging it comes to that.

The gradient that a loss passes back at a token is the right one times the token's weight: it tells that number to ten
digits in float64. So weights are compared with whole ways of averaging, and nothing is said of one number alone.

Letters: B rows and S positions of the batch. All tensors are (B, S), where nothing else is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from moeverify.axes.groups import ROWS, TOKENS, TOP_K, VALID_TOKENS
from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.token_groups import CHUNKS, Groups, TokenMap
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.factor import Factor, Product, Source, is_same
from moeverify.results.token_weights import (
    Averaging,
    CountOf,
    Dependence,
    GroupUnit,
    TokenCount,
    TokenGroups,
    TokenSet,
)

SAME = 1e-7
"""Relative: weights that differ by less are one. They are known to 1e-8, and counts below 1e5 differ by more."""

MOST_ALIKE = 3
"""More averagings that give the same weights, and are as simple, say nothing."""

GROUPS = "groups"
"""What the number of the groups is called, among the sources of a factor."""

_LEAST_CHANCE = -40.0
"""Logarithm to base 2 of the chance that weights repeat as they do, where they depend on something alone."""

_MOST_NUMBERS = 8
_LONGEST_PERIOD = 32
_WHOLE = 1e-9
"""Relative: how near a divisor is to a whole number, where it is one."""

_OF_ALL: tuple[CountOf, ...] = ("valid", "all", "rows", "valid-less-rows", "all-less-rows")
_CORRECTED: tuple[CountOf, ...] = ("valid-less-rows", "all-less-rows", "root-of-valid")

Count = tuple[TokenCount, Tensor]


def measure_weights(tensor: WrongTensor) -> tuple[Tensor, Tensor] | None:
    """Return (weights, counted) of a gradient (B, S, ...): how often the right one each token has.

    None where at some token it is no number of times the right one, or ranks differ. Tokens without a gradient are
    not counted, and must have none.
    """
    products, squares, actual, seen = _multiply(tensor)
    counted = squares > 0.0
    if not bool(seen.all()) or not bool(counted.any()) or bool((actual[~counted] > 0.0).any()):
        return None
    weights = torch.where(counted, products / squares.clamp(min=1e-300), 0.0)
    # What is left of each token's gradient, beside so many times the right one.
    left = (actual - weights.square() * squares).clamp(min=0.0).sqrt()
    # The squares that are subtracted have a rounding of their own, whose root this is.
    allowed = 1e-7 * torch.maximum(actual.sqrt(), weights.abs() * squares.sqrt())
    if not bool((left <= allowed)[counted].all()) or not bool(weights.isfinite().all()):
        return None
    return weights, counted


def _multiply(tensor: WrongTensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what is right times what is there, the squares of both, and which tokens some rank has."""
    shape = tensor.expected.shape[:2]
    products, squares, actual = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    seen = torch.zeros(shape, dtype=torch.bool)
    for shard in tensor.shards:
        if not shard.region.numel or shard.region.flat is not None:
            continue
        expected, found = tensor.expected_of(shard).flatten(2), shard.values().flatten(2)
        at = torch.tensor(tuple(shard.region.dims[0])).unsqueeze(1), torch.tensor(tuple(shard.region.dims[1]))
        products[at] += (expected * found).sum(-1)
        squares[at] += expected.square().sum(-1)
        actual[at] += found.square().sum(-1)
        seen[at] = True
    return products, squares, actual, seen


@dataclass(frozen=True)
class _Fit:
    """An averaging that gives the weights, and what sorts it: the lower, the simpler."""

    averaging: Averaging
    rank: int


class Explainer:
    """Finds how weights come about, among all groups of tokens.

    `sources` are integers of the run that a factor may come from. `keys` are what weights may depend on besides
    places: labels, tokens.
    """

    def __init__(
        self,
        tokens: TokenMap,
        weights: Tensor,
        sources: Sequence[Source] = (),
        keys: Mapping[Dependence, Tensor] | None = None,
    ) -> None:
        self.tokens, self.weights, self.sources = tokens, weights, sources
        self.counted = tokens.counted
        self.total = float(self.counted.sum())
        self.keys = keys or {}

    def explain(self) -> tuple[Averaging, ...]:
        """Return the simplest averagings that give all weights; none where there is none, or are too many."""
        if self._is_constant(self.weights, self.counted):
            return self._find_divisor()
        found = self._find_averagings(self.counted, None)
        if not found:
            found = self._find_without()
        if not found:
            depends_on = self._find_dependence()
            return () if depends_on is None else (Averaging(depends_on=depends_on),)
        least = min(fit.rank for fit in found)
        simplest = list(dict.fromkeys(fit.averaging for fit in found if fit.rank == least))
        return tuple(simplest) if len(simplest) <= MOST_ALIKE else ()

    def _find_divisor(self) -> tuple[Averaging, ...]:
        """Return which count divides all tokens, in the place of the valid ones of the batch."""
        divisor = self.total / float(self.weights[self.counted].mean())
        found: list[Averaging] = []
        for groups in self.tokens.basic:
            number = len(torch.unique(groups.ids[self.counted]))
            counts = list(self.tokens.list_counts(groups))
            for count, field in counts[: len(_OF_ALL)]:
                values = groups.each(field)
                picked = {
                    "first": values[0],
                    "last": values[-1],
                    "largest": values.max(),
                    "smallest": values.min(),
                }
                for whose, value in picked.items() if number > 1 else [("own", values[0])]:
                    over = count.model_copy(update={"whose": whose})
                    if is_same(float(value), divisor):
                        found.append(Averaging(over=over))
                    elif number > 1 and is_same(float(value) * number, divisor):
                        mean = Factor(value=1.0 / number, equals=(Product(over=(GROUPS,)),))
                        found.append(Averaging(over=over, factor=mean))
        whole = round(divisor)
        if not found and whole > 0 and abs(divisor - whole) <= _WHOLE * divisor:
            return (Averaging(divisor=(whole, round(self.total))),)
        # The batch comes first, then what it is divided into.
        units = [each.over.groups.unit for each in found if each.over is not None]
        simplest = [each for each, unit in zip(found, units, strict=True) if unit == units[0]]
        return tuple(simplest) if len(simplest) <= MOST_ALIKE else ()

    def _is_constant(self, values: Tensor, where: Tensor) -> bool:
        some = values[where]
        return float(some.max() - some.min()) <= SAME * float(some.abs().max())

    def _find_averagings(self, where: Tensor, without: TokenSet | None) -> list[_Fit]:
        """Return all averagings of tokens that are counted `where` by these weights, in which others do not count."""
        tokens = self.tokens if without is None else TokenMap(self.tokens.fields, where)
        basic = [(count, field, 0) for groups in tokens.basic for count, field in list_counts(tokens, groups)]
        basic = drop_alike(basic, where)
        chunks = drop_alike(self._list_chunk_counts(tokens, where), where)
        found: list[_Fit] = []
        for over, field, cost in (*basic, *chunks):
            found += self._fit(where, without, cost, over=(over, field))
        for times, field, _ in basic:
            found += self._fit(where, without, 0, times=(times, field))
        if not found:
            for (over, under, cost), (times, field, _) in product((*basic, *chunks), basic):
                found += self._fit(where, without, 10 + cost, over=(over, under), times=(times, field))
        return found

    def _list_chunk_counts(self, tokens: TokenMap, where: Tensor) -> Iterator[tuple[TokenCount, Tensor, int]]:
        classes = _classify(self.weights, where)
        for unit in CHUNKS:
            for size in tokens.list_sizes(unit, classes):
                groups = tokens.chunk(unit, size)
                for count, field in list_counts(tokens, groups):
                    yield count, field, 1

    def _fit(
        self,
        where: Tensor,
        without: TokenSet | None,
        cost: int,
        *,
        over: Count | None = None,
        times: Count | None = None,
    ) -> list[_Fit]:
        """Return the averaging by these counts, where a factor of the run gives the weights."""
        factors = self.weights
        if over is not None:
            factors = factors * over[1] / (self.total if times is None else 1.0)
        if times is not None:
            factors = factors / times[1]
        some = factors[where]
        if not bool(some.isfinite().all()) or not self._is_constant(factors, where):
            return []
        value = float(some.mean())
        factor, is_plain = self._name(value, over, times, where)
        if factor is None:
            return []
        # A number that is none of the run, or a corrected count, is less simple than one more count.
        corrected = sum(each is not None and each[0].of in _CORRECTED for each in (over, times))
        before = sum(each is not None and each[0].whose != "own" for each in (over, times))
        unnamed = 0 if is_plain else 5 if factor.equals else 20
        rank = cost + 2 * corrected + before + unnamed
        averaging = Averaging(
            over=over and over[0],
            times=times and times[0],
            factor=None if is_same(value, 1.0) else factor,
            without=without,
        )
        return [_Fit(averaging, rank)]

    def _name(
        self, value: float, over: Count | None, times: Count | None, where: Tensor
    ) -> tuple[Factor | None, bool]:
        """Return the factor with what it is, and whether it is 1 or one over the number of groups.

        A factor of no name is one where many weights follow from the counts alone.
        """
        if is_same(value, 1.0):
            return Factor(value=1.0), True
        grouped = over or times
        assert grouped is not None
        num_groups = self._count(grouped[0].groups, where)
        # A mean may be over groups of padding alone as well.
        numbers = {num_groups, self._count(grouped[0].groups, torch.ones_like(where))} - {1}
        if over is not None and any(is_same(value * number, 1.0) for number in numbers):
            return Factor(value=value, equals=(Product(over=(GROUPS,)),)), True
        is_mean = times is not None and times[0].of == "valid" and times[0].whose == "own"
        if over is None and is_mean and is_same(value * float(where.sum()) / num_groups, 1.0):
            return Factor(value=value, equals=(Product(times=(GROUPS,), over=(VALID_TOKENS,)),)), True
        factor = find_factor(value, self.sources)
        is_many = len(torch.unique(_classify(self.weights, where)[where])) >= 4
        return (factor if factor.equals or is_many else None), False

    def _count(self, groups: TokenGroups, where: Tensor) -> int:
        """Return how many groups have counted tokens."""
        if groups.size:
            return len(torch.unique(self.tokens.chunk(groups.unit, groups.size).ids[where]))
        return next(len(torch.unique(each.ids[where])) for each in self.tokens.basic if each.name == groups)

    def _find_without(self) -> list[_Fit]:
        """Return averagings by which some tokens count not at all, or otherwise than all others by a factor."""
        classes = _classify(self.weights, self.counted)
        found: list[_Fit] = []
        values = {
            int(each): float(self.weights[(classes == each) & self.counted].mean())
            for each in torch.unique(classes[self.counted])
        }
        zero = next((number for number, value in values.items() if abs(value) <= SAME), None)
        candidates = [zero] if zero is not None else list(values) if len(values) == 2 else []
        for number in candidates:
            inside = (classes == number) & self.counted
            where = self.counted & ~inside
            if not bool(where.any()) or 2 * int(inside.sum()) > int(self.counted.sum()):
                continue
            constant = self._is_constant(self.weights, where)
            rest = float(self.weights[where].mean())
            for each in find_sets(self.tokens, inside):
                without = each.model_copy(update={"times": values[number] / rest if number != zero else 0.0})
                if constant and is_same(rest, 1.0):
                    found.append(_Fit(Averaging(without=without), 0))
                elif constant and number == zero and is_same(rest * float(where.sum()), self.total):
                    over = TokenCount(of="valid", groups=TokenGroups(unit="batch"))
                    found.append(_Fit(Averaging(without=without, over=over), 0))
                elif constant and (factor := find_factor(rest, self.sources)).equals:
                    found.append(_Fit(Averaging(without=without, factor=factor), 5))
                elif number == zero and not constant:
                    found += self._find_averagings(where, without)
        return found

    def _find_dependence(self) -> Dependence | None:
        """Return what alone tells the weight of each token, where that is no chance."""
        rows, columns = self.counted.shape
        places: dict[Dependence, Tensor] = {
            "position": torch.arange(columns).expand(rows, columns),
            "row": torch.arange(rows).unsqueeze(1).expand(rows, columns),
        }
        classes = _classify(self.weights, self.counted)[self.counted]
        shares = torch.bincount(classes).to(torch.float64) / len(classes)
        for name, field in (places | dict(self.keys)).items():
            keys = field[self.counted]
            pairs = torch.unique(torch.stack([keys, classes], dim=1), dim=0)
            if len(pairs) != len(torch.unique(keys)):
                continue
            # All tokens but one of each key have by chance the same weight as that one.
            bits = float(shares[classes].log2().sum()) - float(shares[pairs[:, 1]].log2().sum())
            if bits <= _LEAST_CHANCE:
                return name
        return None


def find_sets(tokens: TokenMap, inside: Tensor) -> list[TokenSet]:
    """Return how the counted tokens that are `inside` can be described, the simplest alone."""
    counted = tokens.counted
    for groups in tokens.basic:
        ids = groups.ids[counted]
        chosen = torch.unique(ids[inside[counted]])
        if bool(torch.isin(ids, chosen).eq(inside[counted]).all()):
            numbers = tuple(chosen.tolist())
            is_few = len(numbers) <= _MOST_NUMBERS
            if is_few:
                return [TokenSet(groups=groups.name, which="numbers", numbers=numbers)]
    return [each for unit in CHUNKS for each in _find_ends(tokens, unit, inside)][:MOST_ALIKE]


def _find_ends(tokens: TokenMap, unit: GroupUnit, inside: Tensor) -> Iterable[TokenSet]:
    """Yield the first, or the last, tokens of each micro-batch, or of each of its rows, where `inside` is these."""
    counted, order = tokens.counted, tokens.order(unit)
    from_end = tokens.length(unit) - 1 - order
    for which, place in (("last", from_end), ("first", order)):
        most = int(place[inside].max())
        others = place[counted & ~inside]
        if not len(others) or int(others.min()) <= most:
            continue
        length = int(tokens.length(unit).max())
        lengths = range(most + 1, int(others.min()) + 1)
        # Padding may be at the border: a chunk begins at a round number.
        size = max(lengths, key=lambda each: math.gcd(length - each, 1 << 20))
        yield TokenSet(groups=TokenGroups(unit=unit), which=which, numbers=(size,))  # type: ignore[arg-type]
    for period in range(2, _LONGEST_PERIOD + 1):
        place = order[inside][:1] % period
        if torch.equal((order % period == place) & counted, inside & counted):
            yield TokenSet(groups=TokenGroups(unit=unit), which="every", numbers=(period, int(place)))
            break
    # What each row ends with, wherever its padding begins.
    if unit == "chunk-of-row":
        rows = torch.arange(counted.shape[0]).unsqueeze(1).expand(counted.shape)
        last = (counted.flip(1).to(torch.int64).cumsum(1) == 1).flip(1) & counted
        if torch.equal(last, inside & counted) and len(rows):
            yield TokenSet(groups=TokenGroups(unit="row"), which="last")


def list_sources(inputs: DiagnosisInputs) -> list[Source]:
    """Return the integers of the run that a mean over tokens may be off by: ranks, rows, tokens."""
    counts = [each for each in inputs.axes.loss_counts if each.name in (ROWS, TOKENS, VALID_TOKENS)]
    return [*(each for each in inputs.axes.sources if each.name != TOP_K), *counts]


def list_counts(tokens: TokenMap, groups: Groups) -> Iterator[Count]:
    """Yield what may be counted of groups: tokens, rows, and how many of these groups are inside of others."""
    yield from tokens.list_counts(groups)
    for inside in tokens.basic:
        if inside.name != groups.name:
            yield tokens.count_groups(groups, inside)


def drop_alike(
    counts: Iterable[tuple[TokenCount, Tensor, int]], where: Tensor
) -> list[tuple[TokenCount, Tensor, int]]:
    """Return the counts that are not the same everywhere, nor a number of times one before."""
    kept: list[tuple[TokenCount, Tensor, int]] = []
    shapes: list[Tensor] = []
    for count, field, cost in counts:
        some = field[where].to(torch.float64)
        if not bool((some > 0.0).all()) or bool((some == some[0]).all()):
            continue
        if any(bool((some == other).all()) for other in shapes):
            continue
        kept.append((count, field.to(torch.float64), cost))
        shapes.append(some)
    return kept


def _classify(values: Tensor, where: Tensor) -> Tensor:
    """Return the numbers of classes of values that are the same, 0 where nothing counts."""
    order = values[where].argsort()
    some = values[where][order]
    steps = torch.zeros(len(some), dtype=torch.int64)
    # Of two that differ by rounding alone the larger is no new value.
    scale = max(float(some.abs().max()), 1e-300)
    steps[1:] = (
        some[1:] - some[:-1] > SAME * torch.maximum(some[1:].abs(), torch.tensor(1e-6 * scale))
    ).cumsum(0)
    found = torch.zeros(values.shape, dtype=torch.int64)
    ranks = torch.empty_like(steps)
    ranks[order] = steps
    found[where] = ranks
    return found
