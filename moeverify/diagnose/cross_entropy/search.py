"""The language of variants, and the search for the simplest one that wrong losses or their gradients are.

The formula is what a loss is on right logits, in float64. It has parts, such as the softmax's denominator, and of
each part ways in which code may have it otherwise. A variant changes one part, or two. Nothing of a variant is fitted
but a single number here and there, so that a match to rounding is no chance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product

import torch
from torch import Tensor

from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.results.change import Change

RIGHT = 1e-9
"""Relative error to which the formula must give the golden's own values: else it is not what the run computes."""

SHARE = 1e-3
"""Of the error, what a variant may leave of it; that of float64 is bounded by rounding besides."""

NO_EFFECT = 1e-6
"""Share of the error under which two outputs are one: a way that changes nothing here explains nothing."""

MOST_TOKENS = 24  # that are looked at first: a way that fails there is not evaluated any further
MOST_ELEMENTS = 1 << 24  # of all that a variant is confirmed on
MOST_PAIRED = 4  # ways of a part that are tried together with those of the other parts
MOST_RIVALS = 3  # more variants than these, of different outputs on the sample, say nothing
MOST_TWINS = 16  # of those that give one output on the sample: pairs of ways may have many
_TOKENS_AT_ONCE = 128
_STEPS = 12  # of a fit of one number
_DIFFERENCE = 1e-5
_LARGEST = 50.0  # logarithm of a number that is looked for


@dataclass(frozen=True)
class Cell:
    """Some tokens of what one rank has in one micro-batch.

    `rows` (b) are those of the batch, `positions` (s) those in the sequence; `dims` are the indices of other dims.
    """

    rows: Tensor
    positions: Tensor
    dims: tuple[Tensor, ...]

    @classmethod
    def of(cls, shard: RankShard) -> Cell:
        """Return all tokens of a shard (rows, positions, ...)."""
        rows, positions, *dims = (torch.tensor(tuple(each)) for each in shard.region.dims)
        return cls(rows, positions, tuple(dims))

    def pick(self, rows: Tensor, places: Tensor) -> Cell:
        """Return a part of it, by the numbers of its rows and of its tokens."""
        return replace(self, rows=self.rows[rows], positions=self.positions[places])


class Formula(ABC):
    """What is computed of right logits.

    `ways` are those in which one part may be otherwise, from simple to complex. `fits` are those with a number that
    is not known, at a start each.
    """

    ways: Sequence[Change] = ()
    fits: Sequence[Change] = ()

    @abstractmethod
    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the values at a cell, (b, s, ...), with the changed parts by name; not a number without a value."""


@dataclass(frozen=True)
class Found:
    """What a search came to: the changes that explain, all others that explain as well, and where.

    `residual` is the share of the error that is left, `ranks` those that compute so where others do not. With
    `tokens` it holds of so many of so many tokens of these ranks alone, and the variants would change the others too.
    `num_tried` counts the variants.
    """

    variants: tuple[tuple[Change, ...], ...] = ()
    residual: float = 0.0
    ranks: tuple[int, ...] = ()
    num_tried: int = 0
    tokens: tuple[int, int] | None = None


Confirmed = dict[tuple[Change, ...], tuple[float, tuple[int, ...]]]
"""Variants, with the share of the error that each leaves, and the ranks that compute so where others do not."""


def find_variant(formula: Formula, tensor: WrongTensor, bound: float) -> Found | None:
    """Return the simplest variants of a formula that are what ranks have; None where the formula does not fit.

    `bound` is the relative error above which what a rank has is wrong.
    """
    search = _Search(formula, tensor, bound)
    return search.run() if search.is_known() else None


class _Search:
    """Looks at a sample of the worst shard first, and confirms on all shards what explains that."""

    def __init__(self, formula: Formula, tensor: WrongTensor, bound: float) -> None:
        self.formula, self.tensor = formula, tensor
        shards = [shard for shard in tensor.shards if shard.local is not None and shard.region.numel]
        self.wrong = [shard for shard in shards if _error(shard, tensor) > bound]
        self.right = [shard for shard in shards if _error(shard, tensor) <= bound]
        self.num_tried = 0
        self.of_some = False

    def is_known(self) -> bool:
        """Return whether the formula gives the golden's values where ranks have others."""
        elements = sum(shard.region.numel for shard in self.wrong)
        if not self.wrong or elements > MOST_ELEMENTS:
            return False
        if not all(bool(torch.isfinite(shard.values()).any()) for shard in self.wrong):
            return False
        self._sample()
        scale = float(self.expected.norm())
        return bool(scale) and float((self.base - self.expected).norm()) <= RIGHT * scale

    def _sample(self) -> None:
        shard = max(self.wrong, key=lambda each: (_error(each, self.tensor), -each.rank))
        cell = Cell.of(shard)
        expected, actual = self.tensor.expected_of(shard), shard.values()
        error = torch.nan_to_num(actual - expected, nan=1.0).flatten(2).norm(dim=-1)
        row = int(error.norm(dim=1).argmax())
        order = error[row].argsort(descending=True, stable=True)
        # Half of them are the worst, and half are spread over all that the rank has, right ones among them.
        spread = torch.linspace(0, len(order) - 1, min(len(order), MOST_TOKENS // 2)).long()
        places = torch.tensor(sorted({*order[: MOST_TOKENS // 2].tolist(), *spread.tolist()}))
        rows = torch.tensor([row])
        self.cell = cell.pick(rows, places)
        self.expected = expected[rows][:, places]
        self.actual = actual[rows][:, places]
        self.base = self._evaluate(self.cell, ())

    def run(self) -> Found:
        groups = self._group_ways()
        found = self._confirm_all([(way,) for way in group] for group in groups)
        found = found or self._confirm_all([(fit,)] for fit in self._fit(self.formula.fits))
        found = found or self._confirm_all(self._pair(groups))
        counts = [self._find_wrong_tokens(shard) for shard in self.wrong]
        tokens = (sum(int(each.sum()) for each in counts), sum(each.numel() for each in counts))
        if not found and tokens[0] < tokens[1]:
            self._keep_wrong_tokens()
            found = self._confirm_all([(way,) for way in group] for group in self._group_ways())
        confirmed = {changes: how for group in found for changes, how in group.items()}
        if not found or len(found) > MOST_RIVALS:
            return Found(num_tried=self.num_tried)
        # What holds on all ranks needs no restriction to some: it is simpler than what does.
        spared = {changes: how for changes, how in confirmed.items() if not how[1]}
        confirmed = spared or confirmed
        # A function that anything may pass through says less than a part of the formula that does the same here.
        own = {changes: how for changes, how in confirmed.items() if not any(map(_is_general, changes))}
        confirmed = own or confirmed
        residual, ranks = next(iter(confirmed.values()))
        some = tokens if self.of_some else None
        return Found(tuple(confirmed), residual, ranks, self.num_tried, some)

    def _find_wrong_tokens(self, shard: RankShard) -> Tensor:
        """Return which tokens (b, s) of a shard are wrong."""
        expected, error = self.tensor.expected_of(shard), shard.values() - self.tensor.expected_of(shard)
        size = float(expected.norm()) / math.sqrt(max(math.prod(expected.shape[:2]), 1))
        wrong: Tensor = ~(error.flatten(2).norm(dim=-1) <= self.tensor.exact * size)
        return wrong

    def _keep_wrong_tokens(self) -> None:
        """Look at tokens that are wrong alone from now on, of which the sample has some."""
        self.of_some = True
        error = (self.actual - self.expected).nan_to_num(nan=1.0).flatten(2).norm(dim=-1)[0]
        places = (error > NO_EFFECT * float(error.max())).nonzero().flatten()
        self.cell = self.cell.pick(torch.tensor([0]), places)
        self.expected, self.actual = self.expected[:, places], self.actual[:, places]
        self.base = self.base[:, places]

    def _pair(self, groups: Sequence[Sequence[Change]]) -> Iterator[list[tuple[Change, ...]]]:
        """Yield the pairs of ways of two parts, with all that give the same output one by one."""
        parts: dict[str, list[Sequence[Change]]] = {}
        for group in groups:
            parts.setdefault(group[0].place, []).append(group)
        simple = [group for members in parts.values() for group in members[:MOST_PAIRED]]
        for first, second in combinations(simple, 2):
            if first[0].place != second[0].place:
                pairs = (pair for pair in product(first, second) if pair[0].place != pair[1].place)
                yield list(islice(pairs, MOST_TWINS))

    def _group_ways(self) -> list[list[Change]]:
        """Return the ways that change the sample, those of one output there together.

        Of a shift by so many positions and that by as many in the other direction one stands for both.
        """
        scale = NO_EFFECT * float((self.actual - self.base).nan_to_num().norm())
        outputs: list[Tensor] = []
        groups: list[list[Change]] = []
        for way in self.formula.ways:
            value = torch.nan_to_num(self._evaluate(self.cell, (way,)), nan=0.0)
            if float((value - self.base.nan_to_num()).norm()) <= scale:
                continue
            alike = [
                number for number, output in enumerate(outputs) if float((value - output).norm()) <= scale
            ]
            if not alike:
                outputs.append(value)
                groups.append([way])
            elif not any(_is_turned(way, other) for other in groups[alike[0]]):
                groups[alike[0]].append(way)
        return groups

    def _fit(self, starts: Sequence[Change]) -> Iterator[Change]:
        """Yield each way with the number that fits the sample best, found by Gauss-Newton steps in its logarithm."""
        seen: set[tuple[str, str, str]] = set()
        for start in starts:
            assert start.number is not None
            at = math.log(start.number)
            for _ in range(_STEPS):
                left = self._leave(start, at)
                slope = (self._leave(start, at + _DIFFERENCE) - left) / _DIFFERENCE
                square = float((slope * slope).sum())
                step = -float((slope * left).sum()) / square if square else 0.0
                at += max(min(step, 1.0), -1.0)
                if not math.isfinite(at) or abs(step) < 1e-13:
                    break
            if not math.isfinite(at) or abs(at) > _LARGEST:
                continue
            number = float(f"{math.exp(at):.6g}")
            number = number if self._fits(start, number) else math.exp(at)
            if (start.part, start.way, f"{number:.6g}") not in seen:
                seen.add((start.part, start.way, f"{number:.6g}"))
                yield start.model_copy(update={"number": number})

    def _fits(self, way: Change, number: float) -> bool:
        """Return whether a number of few digits, which somebody may have written, explains the sample as well."""
        error = float((self.actual - self.base).nan_to_num().norm())
        return float(self._leave(way, math.log(number)).norm()) <= 1e-2 * self.tensor.exact * error

    def _leave(self, way: Change, at: float) -> Tensor:
        changed = way.model_copy(update={"number": math.exp(at)})
        return (self._evaluate(self.cell, (changed,)) - self.actual).nan_to_num()

    def _confirm_all(self, groups: Iterable[Sequence[tuple[Change, ...]]]) -> list[Confirmed]:
        """Return of each group that explains the sample the variants that explain all, where there are some."""
        found = []
        for group in groups:
            self.num_tried += 1
            if self._compare(self._evaluate(self.cell, group[0]), self.actual, self.base) > SHARE:
                continue
            confirmed = {changes: how for changes in group if (how := self._confirm(changes)) is not None}
            found += [confirmed] if confirmed else []
        return found

    def _confirm(self, changes: tuple[Change, ...]) -> tuple[float, tuple[int, ...]] | None:
        """Return the share of the error that a variant leaves, and the ranks that compute so where others do not."""
        worst = 0.0
        for shard in self.wrong:
            cell = Cell.of(shard)
            value = self._evaluate_all(cell, changes)
            actual, expected = shard.values(), self.tensor.expected_of(shard)
            if self.of_some:
                wrong = self._find_wrong_tokens(shard)
                value, actual, expected = value[wrong], actual[wrong], expected[wrong]
            left = self._compare(value, actual, expected)
            allowed = (
                self.tensor.exact * float(expected.norm()) / float((actual - expected).nan_to_num().norm())
            )
            if not left <= min(SHARE, allowed):
                return None
            worst = max(worst, left)
        spared = [shard for shard in self.right if not self._is_unaffected(shard, changes)]
        return worst, tuple(sorted({shard.rank for shard in self.wrong})) if spared else ()

    def _is_unaffected(self, shard: RankShard, changes: tuple[Change, ...]) -> bool:
        cell = Cell.of(shard)
        value, right = self._evaluate_all(cell, changes), self.tensor.expected_of(shard)
        return float((value - right).nan_to_num().norm()) <= self.tensor.exact * float(right.norm())

    def _evaluate_all(self, cell: Cell, changes: tuple[Change, ...]) -> Tensor:
        """Evaluate a whole cell, a few tokens of one row at a time: all logits at once may be large."""
        rows = []
        for row in range(len(cell.rows)):
            places = torch.chunk(torch.arange(count := len(cell.positions)), -(-count // _TOKENS_AT_ONCE))
            parts = [self._evaluate(cell.pick(torch.tensor([row]), part), changes) for part in places]
            rows.append(torch.cat(parts, dim=1))
        return torch.cat(rows)

    def _evaluate(self, cell: Cell, changes: Sequence[Change]) -> Tensor:
        with torch.no_grad():
            return self.formula.evaluate(cell, {change.place: change for change in changes})

    def _compare(self, value: Tensor, actual: Tensor, base: Tensor) -> float:
        """Return the share of the error that is left, where the variant has a value; infinite where it has few."""
        known = torch.isfinite(value)
        if (
            not bool(known.any())
            or float(known.double().mean()) < 0.5
            or not torch.isfinite(actual[known]).all()
        ):
            return math.inf
        error = float((actual - base)[known].norm())
        return float((value - actual)[known].norm()) / error if error else math.inf


def _is_general(change: Change) -> bool:
    """Return whether a change is one function more that something passes through."""
    return change.part.endswith("-through")


def _is_turned(way: Change, other: Change) -> bool:
    """Return whether two ways are one shift in both directions."""
    return (way.part, way.way, way.name) == (other.part, other.way, other.name) and way.number == -(
        other.number or 0.0
    )


def _error(shard: RankShard, tensor: WrongTensor) -> float:
    """Return the relative error of a shard."""
    scale = float(tensor.expected_of(shard).norm()) or float(tensor.expected.norm()) or 1.0
    return tensor.error_of(shard) / scale
