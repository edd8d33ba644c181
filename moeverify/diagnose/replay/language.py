"""The language of variants, and the search for the simplest one that a wrong output is.

A formula is what a module computes on right inputs, in float64. It has parts, such as the mask, the scale and the
rotation of attention, and of each part ways in which code may have it otherwise. A variant changes one part, or two.
Nothing of a variant is fitted but a single number here and there, so that a match to rounding is no chance.
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
"""Relative error to which the formula must give the golden's own output: else it is not what the module computes."""

SHARE = 1e-3
"""Of the error, what a variant may leave of it; that of float64 is bounded by rounding besides."""

NO_EFFECT = 1e-6
"""Share of the error under which two outputs are one: a way that changes nothing here explains nothing."""

EQUAL = 1e-10
"""Relative difference up to which two variants of random numbers are one, spelled in other words."""

MOST_TOKENS = 24  # that are looked at first: a way that fails there is not evaluated any further
MOST_ELEMENTS = 1 << 24  # of all that a variant is confirmed on
MOST_PAIRED = 4  # ways of a part that are tried together with those of others
MOST_RIVALS = 3  # more variants than these, of different outputs on the sample, say nothing
MOST_TWINS = 16  # of those that give one output on the sample: pairs of ways may have many
_TOKENS_AT_ONCE = 128
_STEPS = 12  # of a fit of one number
_DIFFERENCE = 1e-5
_LARGEST = 50.0  # logarithm of a number that is looked for


@dataclass(frozen=True)
class Cell:
    """Some tokens of what one rank has of a module's output, in one micro-batch.

    `rows` are those of the batch, `places` of the tokens in what the rank has and `positions` in the sequence; `dims`
    are the indices of the other dims. `call` has the rows and the positions of all tokens that the rank has there,
    which its module took in one call. Shapes: rows (b), places and positions (s), int64.
    """

    rank: int
    rows: Tensor
    places: Tensor
    positions: Tensor
    dims: tuple[Tensor, ...]
    call: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, shard: RankShard) -> Cell:
        """Return all tokens of a shard (rows, positions, ...)."""
        rows, positions, *dims = (torch.tensor(tuple(each)) for each in shard.region.dims)
        places = torch.arange(len(positions))
        return cls(shard.rank, rows, places, positions, tuple(dims), (rows, positions))

    def of_call(self) -> Cell:
        """Return the cell of all tokens of the call."""
        rows, positions = self.call or (self.rows, self.positions)
        return replace(self, rows=rows, places=torch.arange(len(positions)), positions=positions)

    def pick_from_call(self, values: Tensor) -> Tensor:
        """Return of values for all tokens of the call those of this cell."""
        if self.call is None:
            return values
        rows = (self.call[0] == self.rows.unsqueeze(1)).int().argmax(1)
        return values[rows][:, self.places]

    def pick(self, rows: Tensor, places: Tensor) -> Cell:
        """Return a part of it, by the numbers of its rows and of its tokens."""
        return replace(
            self, rows=self.rows[rows], places=self.places[places], positions=self.positions[places]
        )


class Formula(ABC):
    """What a module computes on right inputs.

    `ways` are those in which one part may be otherwise, from simple to complex. `fits` are those with a number that
    is not known, at a start each. `places` are where alone a way may hold, such as the experts of one rank.
    `alone` are the parts whose ways are tried neither there nor with those of others. `block` is how many elements
    of the last dim stand together, such as a head. `has_pairs` says whether ways of two parts are tried together,
    `most_paired` of each part.
    """

    ways: Sequence[Change] = ()
    fits: Sequence[Change] = ()
    places: Sequence[Change] = ()
    alone: frozenset[str] = frozenset()
    has_pairs: bool = True
    most_paired: int = MOST_PAIRED
    block: int = 0

    @abstractmethod
    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the output at a cell, (b, s, ...), with the changed parts by name.

        What has no value under a change, such as the output of a query that sees no key, is not a number.
        """

    def redraw(self) -> Formula | None:
        """Return the same formula of numbers that are drawn anew; None where this is not known.

        Variants that are equal by algebra are equal there too, and others are not.
        """
        return None


def draw_like(x: Tensor, seed: int = 0) -> Tensor:
    """Return numbers of the shape of x that have no mean of zero and no order, float64."""
    generator = torch.Generator().manual_seed(seed)
    return 0.3 + torch.randn(x.shape, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class NamedFormula:
    """A formula, and what it is called."""

    name: str
    formula: Formula


@dataclass(frozen=True)
class Found:
    """What a search came to: the changes that explain, all others that explain as well, and where.

    `residual` is the share of the error that is left, `ranks` those that compute so where others do not, `blocks`
    those that are wrong where others are right. With `tokens` it holds of so many of so many tokens of these ranks
    alone, and the variants would change the others too. `num_tried` counts the variants.
    """

    variants: tuple[tuple[Change, ...], ...] = ()
    residual: float = 0.0
    ranks: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    num_tried: int = 0
    tokens: tuple[int, int] | None = None


Confirmed = dict[tuple[Change, ...], tuple[float, tuple[int, ...]]]
"""Variants, with the share of the error that each leaves, and the ranks that compute so where others do not."""


def find_variant(formula: Formula, tensor: WrongTensor, bound: float, right: float = RIGHT) -> Found | None:
    """Return the simplest variants of a formula that are what ranks have; None where the formula does not fit.

    `bound` is the relative error above which a rank's output is wrong, `right` that to which the formula must give
    what is expected.
    """
    search = _Search(formula, tensor, bound, right)
    return search.run() if search.is_known() else None


class _Search:
    """Looks at a sample of the worst shard first, and confirms on all shards what explains that."""

    def __init__(self, formula: Formula, tensor: WrongTensor, bound: float, right: float) -> None:
        self.formula, self.tensor, self._bound_of_formula = formula, tensor, right
        shards = [shard for shard in tensor.shards if shard.local is not None and shard.region.numel]
        self.wrong = [shard for shard in shards if _error(shard, tensor) > bound]
        self.right = [shard for shard in shards if _error(shard, tensor) <= bound]
        self.blocks = self._find_wrong_blocks(bound)
        self.num_tried = 0
        self.of_some = False

    def is_known(self) -> bool:
        """Return whether the formula gives the golden's output where ranks have another."""
        elements = sum(shard.region.numel for shard in self.wrong)
        if not self.wrong or elements > MOST_ELEMENTS:
            return False
        if not all(bool(torch.isfinite(shard.values()).any()) for shard in self.wrong):
            return False
        self._sample()
        scale = float(self.expected.norm())
        return bool(scale) and float((self.base - self.expected).norm()) <= self._bound_of_formula * scale

    def _sample(self) -> None:
        shard = max(self.wrong, key=lambda each: (_error(each, self.tensor), -each.rank))
        cell = Cell.of(shard)
        expected, actual = self.tensor.expected_of(shard), shard.values()
        error = self._mask(cell, torch.nan_to_num(actual - expected, nan=1.0)).flatten(2).norm(dim=-1)
        row = int(error.norm(dim=1).argmax())
        order = error[row].argsort(descending=True, stable=True)
        # Half of them are the worst, and half are spread over all that the rank has, right ones among them.
        spread = torch.linspace(0, len(order) - 1, min(len(order), MOST_TOKENS // 2)).long()
        places = torch.tensor(sorted({*order[: MOST_TOKENS // 2].tolist(), *spread.tolist()}))
        rows = torch.tensor([row])
        self.cell = cell.pick(rows, places)
        self.expected = self._mask(cell, expected[rows][:, places])
        self.actual = self._mask(cell, actual[rows][:, places])
        self.base = self._evaluate(self.cell, ())

    def run(self) -> Found:
        groups = self._group_ways()
        found = self._confirm_all([(way,) for way in group] for group in groups)
        found = found or self._confirm_all([(fit,)] for fit in self._fit(self.formula.fits, ()))
        found = found or self._confirm_all(self._restrict(groups))
        if self.formula.has_pairs:
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
        confirmed = {changes: confirmed[changes] for changes in self._drop_equal(list(confirmed))}
        residual, ranks = next(iter(confirmed.values()))
        blocks = self._list_spared_by(next(iter(confirmed)))
        return Found(
            tuple(confirmed), residual, ranks, blocks, self.num_tried, tokens if self.of_some else None
        )

    def _drop_equal(self, variants: Sequence[tuple[Change, ...]]) -> list[tuple[Change, ...]]:
        """Return the first of those variants that are equal by algebra, which is the simplest, and all others.

        They give the same of any numbers. What gives the same of the numbers of this run alone is another cause.
        """
        other = self.formula.redraw() if len(variants) > 1 else None
        if other is None:
            return list(variants)
        kept: list[tuple[tuple[Change, ...], Tensor]] = []
        for changes in sorted(variants, key=len):
            with torch.no_grad():
                value = other.evaluate(self.cell, {change.place: change for change in changes}).nan_to_num()
            size = EQUAL * float(value.norm())
            if not any(float((value - before).norm()) <= size for _, before in kept):
                kept.append((changes, value))
        return [changes for changes, _ in kept]

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

    def _restrict(self, groups: Sequence[Sequence[Change]]) -> Iterator[list[tuple[Change, ...]]]:
        """Yield the ways in one place alone, those that give the same output everywhere together."""
        for place in self.formula.places:
            for group in groups:
                ways = [way for way in group if way.part not in self.formula.alone]
                if ways:
                    yield [(way, place) for way in ways]

    def _pair(self, groups: Sequence[Sequence[Change]]) -> Iterator[list[tuple[Change, ...]]]:
        """Yield the pairs of ways of two parts, with all that give the same output one by one."""
        parts: dict[str, list[Sequence[Change]]] = {}
        for group in groups:
            if group[0].part not in self.formula.alone:
                parts.setdefault(group[0].place, []).append(group)
        simple = [group for members in parts.values() for group in members[: self.formula.most_paired]]
        for first, second in combinations(simple, 2):
            if first[0].place != second[0].place:
                pairs = (pair for pair in product(first, second) if pair[0].place != pair[1].place)
                yield list(islice(pairs, MOST_TWINS))

    def _list_spared_by(self, changes: Sequence[Change]) -> tuple[int, ...]:
        """Return the wrong blocks, where a variant would change those that are right too; else none."""
        if self.blocks is None:
            return ()
        with torch.no_grad():
            value = self.formula.evaluate(self.cell, {change.place: change for change in changes})
            base = self.formula.evaluate(self.cell, {})
        right = ~torch.isin(self.cell.dims[-1] // self.formula.block, self.blocks)
        moved = float((value - base)[..., right].nan_to_num().norm())
        return tuple(self.blocks.tolist()) if moved > NO_EFFECT * float(base.norm()) else ()

    def _group_ways(self) -> list[list[Change]]:
        """Return the ways that change the sample, those of one output there together.

        Of a shift by so many ranks or rows and that by as many in the other direction one stands for both.
        """
        scale = NO_EFFECT * float((self.actual - self.base).nan_to_num().norm())
        # Two outputs are no nearer to each other than what they have along one direction of length 1 is: most are
        # told apart by that one number.
        direction = draw_like(self.base.double())
        direction /= direction.norm()
        outputs: list[tuple[float, Tensor]] = []
        groups: list[list[Change]] = []
        for way in self.formula.ways:
            value = torch.nan_to_num(self._evaluate(self.cell, (way,)), nan=0.0)
            if float((value - self.base.nan_to_num()).norm()) <= scale:
                continue
            along = float((value * direction).sum())
            at = next(
                (
                    number
                    for number, (before, output) in enumerate(outputs)
                    if abs(along - before) <= 2.0 * scale and float((value - output).norm()) <= scale
                ),
                None,
            )
            if at is None:
                outputs.append((along, value))
                groups.append([way])
            elif not any(_is_turned(way, other) for other in groups[at]):
                groups[at].append(way)
        return groups

    def _fit(self, starts: Sequence[Change], others: tuple[Change, ...]) -> Iterator[Change]:
        """Yield each way with the number that fits the sample best, found by Gauss-Newton steps in its logarithm."""
        seen: set[tuple[str, str, str]] = set()
        for start in starts:
            assert start.number is not None
            at = math.log(start.number)
            for _ in range(_STEPS):
                left = self._leave(start, at, others)
                slope = (self._leave(start, at + _DIFFERENCE, others) - left) / _DIFFERENCE
                square = float((slope * slope).sum())
                step = -float((slope * left).sum()) / square if square else 0.0
                at += max(min(step, 1.0), -1.0)
                if not math.isfinite(at) or abs(step) < 1e-13:
                    break
            if not math.isfinite(at) or abs(at) > _LARGEST:
                continue
            number = float(f"{math.exp(at):.6g}")
            number = number if self._fits(start, number, others) else math.exp(at)
            if (start.part, start.way, f"{number:.6g}") not in seen:
                seen.add((start.part, start.way, f"{number:.6g}"))
                yield start.model_copy(update={"number": number})

    def _fits(self, way: Change, number: float, others: tuple[Change, ...]) -> bool:
        """Return whether a number of few digits, which somebody may have written, explains the sample as well."""
        error = float((self.actual - self.base).nan_to_num().norm())
        return float(self._leave(way, math.log(number), others).norm()) <= 1e-2 * self.tensor.exact * error

    def _leave(self, way: Change, at: float, others: tuple[Change, ...]) -> Tensor:
        changed = way.model_copy(update={"number": math.exp(at)})
        return (self._evaluate(self.cell, (*others, changed)) - self.actual).nan_to_num()

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
            actual = self._mask(cell, shard.values())
            expected = self._mask(cell, self.tensor.expected_of(shard))
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
        value, right = self._evaluate_all(cell, changes), self._mask(cell, self.tensor.expected_of(shard))
        return float((value - right).nan_to_num().norm()) <= self.tensor.exact * float(right.norm())

    def _evaluate_all(self, cell: Cell, changes: tuple[Change, ...]) -> Tensor:
        """Evaluate a whole cell, a few tokens of one row at a time: scores of all queries at once may be large."""
        rows = []
        for row in range(len(cell.rows)):
            places = torch.chunk(torch.arange(count := len(cell.places)), -(-count // _TOKENS_AT_ONCE))
            parts = [self._evaluate(cell.pick(torch.tensor([row]), part), changes) for part in places]
            rows.append(torch.cat(parts, dim=1))
        return torch.cat(rows)

    def _evaluate(self, cell: Cell, changes: Sequence[Change]) -> Tensor:
        with torch.no_grad():
            return self._mask(cell, self.formula.evaluate(cell, {change.place: change for change in changes}))

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

    def _find_wrong_blocks(self, bound: float) -> Tensor | None:
        """Return the blocks of the last dim that are wrong on some rank, None where all are."""
        if not self.formula.block or not self.wrong:
            return None
        wrong: set[int] = set()
        for shard in self.wrong:
            numbers = torch.tensor(tuple(shard.region.dims[-1])) // self.formula.block
            error, scale = shard.values() - self.tensor.expected_of(shard), self.tensor.expected_of(shard)
            for number in sorted(set(numbers.tolist())):
                inside = numbers == number
                if not float(error[..., inside].norm()) <= bound * float(scale[..., inside].norm()):
                    wrong.add(number)
        all_blocks = self.tensor.expected.shape[-1] // self.formula.block
        return torch.tensor(sorted(wrong)) if 0 < len(wrong) < all_blocks else None

    def _mask(self, cell: Cell, value: Tensor) -> Tensor:
        """Return the values with zeros in the blocks that are right."""
        if self.blocks is None:
            return value
        inside = torch.isin(cell.dims[-1] // self.formula.block, self.blocks)
        return torch.where(inside, value, torch.zeros_like(value))


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
