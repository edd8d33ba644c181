"""Alternative formulas that explain a wrong optimizer result, from a grammar, on a sample of elements.

Letters: E sampled elements of S shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moeverify.case.schema import Optimizer
from moeverify.checks.step_rounding import Rounding
from moeverify.results.step_facts import OTHER_STEP, RIGHT, Changes, StepChange
from moeverify.train.optimizer_kinds import OptimizerKind
from moeverify.train.recomputation import WEIGHT, Recomputed, StepValues, Term
from moeverify.train.step_grammar import Grammar

MOST_OF_VARIANTS = 1 << 8
"""Maximum number of evenly spaced elements per shard that are compared with other formulas."""

MOST_STEPS = 1 << 10
"""Number of steps whose bias corrections are tried for a wrong update."""

_NEAR_STEPS, _FEW = 8, 16
"""The nearest steps, selected by a few elements, are compared in each element of a shard."""

_LEAST = 4
"""Least number of elements for a fitted number: a single element fits any number."""

_EXACT = 2.0**-24
"""Unit of rounding up to which formulas are distinguishable: float32's."""

_PLAIN = ("corrections", "decay")
"""Parts that are distinguishable in 16 bits. There elements have few values, which many formulas give."""

_PLAIN_WAYS = ("not-clipped", "clipped-by-value")
"""Distinguishable ways of other parts: a much larger gradient has other values."""

_UNDECAYED: StepChange = "no-decay-in-gradient"
"""Distinguishable in 16 bits by its own rounding: a decay's rounding may exceed the whole gradient."""

_ALLOWED = 4.0
"""Allowed multiple of the rounding's squared error in a shard, for another formula."""

_ROOM = 1 << 22
"""Maximum number of elements that are stacked to index them in one launch."""

_SAME = 1e-3
"""Relative difference up to which a number counts as the usual one."""

_MADE = "made"
"""Name of the only term of a formula that is compared as a whole."""

_MOST_ALIKE = 3
"""If more formulas with the same number of changes fit, none is reported."""

_SURE = 8.0
"""Allowed error of a coefficient, as a multiple of its own error."""

Found = dict[Changes, float | None]
"""For one shard, the formulas that give all of its elements, with the fitted number of each, if any."""


class Coefficient(NamedTuple):
    """Coefficient of a term, with the error of its fit."""

    value: float
    error: float = 0.0


@dataclass(frozen=True)
class Formulas:
    """A smaller sample of a result, for comparison with other formulas if its own does not explain it.

    `right` and `actual` (E,) are the expected and actual results of a step on `values`. The result is added
    to `start` (E,), which is zero for a moment. `sizes` (S) are the numbers of elements of each shard.
    """

    kind: OptimizerKind
    spec: Optimizer
    values: StepValues
    right: Recomputed
    actual: Tensor
    start: Tensor
    dtypes: Collection[torch.dtype]
    sizes: Sequence[int]

    @classmethod
    def sample_all(
        cls,
        kind: OptimizerKind,
        spec: Optimizer,
        values: StepValues,
        results: Sequence[tuple[Recomputed, Tensor, Tensor]],
        dtypes: Collection[torch.dtype],
        sizes: Sequence[int],
    ) -> list[Formulas]:
        """Return a smaller sample of each result, for shards of these `sizes`, without synchronization.

        `results` are triples of the recomputed result of `values`, the sum of its terms, and the actual
        result, each (N,).
        """
        places, few = _choose(tuple(sizes), values.weight.device)
        sampled = take_few(values, places)
        wanted = [
            each
            for right, expected, actual in results
            for each in (
                expected,
                right.rounded,
                right.options,
                right.squared,
                actual if right.name == WEIGHT else None,
            )
            if isinstance(each, Tensor)
        ]
        taken = iter(_take(wanted, places))
        zeros = torch.zeros_like(sampled.weight)  # a moment is added to zero
        found = []
        for right, _, _ in results:
            made = replace(
                right,
                terms=(Term(_MADE, 1.0, next(taken)),),
                rounded=next(taken),
                options=next(taken) if isinstance(right.options, Tensor) else right.options,
                squared=next(taken) if isinstance(right.squared, Tensor) else right.squared,
            )
            is_weight = right.name == WEIGHT
            actual = next(taken) if is_weight else sampled.after[right.name]
            start = sampled.weight if is_weight else zeros
            found.append(cls(kind, spec, sampled, made, actual, start, dtypes, few))
        return found

    def take(self, places: Tensor, sizes: Sequence[int]) -> Formulas:
        """Return the same formulas for some elements."""
        options, squared = self.right.options, self.right.squared
        right = replace(
            self.right,
            terms=(Term(_MADE, 1.0, self.right.expected[places]),),
            rounded=self.right.rounded[places],
            options=options if isinstance(options, float) else options[places],
            squared=squared if isinstance(squared, float) else squared[places],
        )
        values = take_few(self.values, places)
        return replace(
            self,
            values=values,
            right=right,
            actual=self.actual[places],
            start=self.start[places],
            sizes=sizes,
        )

    def find_fitting(self, wrong: Sequence[bool]) -> list[Found]:
        """Return for each shard the formulas that give all of its elements, up to rounding.

        Synchronizes with the device. `wrong` (S) marks the shards that the right formula does not explain.
        Formulas with two changes are tried if one is not enough, then with three.
        """
        found: list[Found] = [{} for _ in self.sizes]
        errors = (self.actual - self.right.expected).abs()
        for each, part in zip(found, self._split(errors <= self._bound(self.right.expected)), strict=True):
            if bool(part.all()):
                each[RIGHT] = None
        grammar = self._find_grammar()
        if grammar is None:
            return found
        if any(_UNDECAYED in ways for ways in grammar.parts.values()):
            self._try_undecayed(found)
        if Rounding.of(self.dtypes).unit > _EXACT:
            grammar = replace(grammar, parts=_list_plain(grammar.parts))
        for changes in grammar.list_changes(1):
            self._try(found, grammar, changes)
        for each, fits in zip(found, self._fit_other_steps(), strict=True):
            if fits:
                each[OTHER_STEP] = None
        left = [number for number, each in enumerate(found) if wrong[number] and not each]
        if left and Rounding.of(self.dtypes).unit <= _EXACT:
            left = self._leave_out_known(grammar, left)
            for count in (2, 3):
                several = self._find_several(grammar, left, count) if left else {}
                for number, forms in several.items():
                    found[number] = forms if len(forms) <= _MOST_ALIKE else {}
                left = [number for number in left if not several[number]]
        return found

    def explain(self, coefficients: Sequence[Sequence[Coefficient]]) -> list[bool]:
        """Return for each shard whether its terms with these coefficients (S, T) leave only rounding.

        Intermediate roundings are as large as the terms with these coefficients, not with the right ones.
        Otherwise a result far below the right one would be explained by anything. Either each element is
        within its own rounding bound, or the whole shard is within the sum of squares.
        """
        recomputed = self.kind.recompute(self.spec, self.values)
        right = next(each for each in recomputed if each.name == self.right.name)
        sizes = torch.tensor(list(self.sizes), device=self.actual.device)
        made = size = usual = unsure = torch.zeros_like(self.actual)
        for term, found in zip(right.terms, zip(*coefficients, strict=True), strict=True):
            numbers = torch.tensor(found, dtype=made.dtype, device=made.device).repeat_interleave(sizes, 0)
            made = made + numbers[:, 0] * term.values
            size = size + (numbers[:, 0] * term.values).abs()
            usual = usual + (term.coefficient * term.values).abs()
            unsure = unsure + _SURE * numbers[:, 1] * term.values.abs()
        share = torch.where(usual > 0.0, size / usual, 0.0)
        other = replace(
            right,
            terms=(Term(_MADE, 1.0, made),),
            rounded=share * right.rounded + 4.0 * size,
            options=share * right.options,
            squared=share * right.squared,
        )
        allowed = Rounding.of(self.dtypes).bound(other, self.start, self.actual)[0] + unsure
        errors = (self.actual - made).abs()
        pairs = zip(self._split(errors), self._split(allowed), strict=True)
        return [
            bool((left <= most).all()) or float(left @ left) <= _ALLOWED * float(most @ most)
            for left, most in pairs
        ]

    def _leave_out_known(self, grammar: Grammar, left: Sequence[int]) -> list[int]:
        """Return the shards that no single known coefficient explains. Others need no further changes."""
        known: list[Found] = [{} for _ in self.sizes]
        for changes in grammar.list_known():
            self._try(known, grammar, changes)
        return [number for number in left if not known[number]]

    def _find_several(self, grammar: Grammar, left: Sequence[int], count: int) -> Mapping[int, Found]:
        """Return the formulas with `count` changes for the shards `left`, preselected on a few elements."""
        sizes = [min(size, _FEW) for size in self.sizes]
        starts = [end - size for end, size in zip(accumulate(self.sizes), self.sizes, strict=True)]
        places = [
            start + torch.arange(few) * size // few
            for start, size, few in zip(starts, self.sizes, sizes, strict=True)
        ]
        sample = self.take(torch.cat(places).to(self.actual.device), sizes)
        chosen, few = set[Changes](), sample._find_grammar()
        assert few is not None
        for changes in grammar.list_changes(count):
            tried: list[Found] = [{} for _ in sizes]
            sample._try(tried, few, changes)
            if any(tried[number] for number in left):
                chosen.add(changes)
        found: list[Found] = [{} for _ in self.sizes]
        for changes in sorted(chosen):
            self._try(found, grammar, changes)
        return {number: found[number] for number in left}

    def _find_grammar(self) -> Grammar | None:
        return self.kind.find_grammar(self.spec, self.values, self.right.name, self.actual, self._solve)

    def _try(self, found: list[Found], grammar: Grammar, changes: Changes) -> None:
        """Record for each shard whether a formula with these changes explains it."""
        made = grammar.make(changes)
        errors = (self.actual - made.values).abs()
        # Division by zero makes the bound infinite, so such elements must not fit.
        errors = errors.where(made.values.isfinite(), torch.nan)
        # A squared sum or a fitted number depends on the rounding of other elements too.
        bound = self._bound(made.values, made.shrunk_by)
        pairs = zip(self._split(errors.square()), self._split(bound.square()), strict=True)
        if Rounding.of(self.dtypes).unit > _EXACT:
            fits = [bool(part.all()) for part in self._split(errors <= bound)]
        else:
            fits = [float(left.sum()) <= _ALLOWED * float(most.sum()) for left, most in pairs]
        if made.number is None:
            numbers: Sequence[float | None] = [None] * len(fits)
        else:
            numbers = [float(each[0]) for each in self._split(made.number)]
            fits = [fit and _is_other(number, made.usual) for fit, number in zip(fits, numbers, strict=True)]
        for each, is_it, value in zip(found, fits, numbers, strict=True):
            if is_it:
                each[changes] = value

    def _bound(self, expected: Tensor, shrunk_by: float | None = None) -> Tensor:
        # Another formula has other intermediate values, as large as its result and the right one.
        rounded = self.right.rounded + 4.0 * (expected.abs() + self.right.expected.abs())
        variant = replace(self.right, terms=(Term(_MADE, 1.0, expected),), rounded=rounded)
        variant = variant if shrunk_by is None else replace(variant, shrunk_by=shrunk_by)
        allowed, _ = Rounding.of(self.dtypes).bound(variant, self.start, self.actual)
        return allowed

    def _split(self, values: Tensor) -> Iterable[Tensor]:
        return torch.split(values.cpu(), list(self.sizes))

    def _solve(self, target: Tensor, direction: Tensor) -> Tensor:
        """Return x (E) of `target = x * direction` by least squares, per shard; NaN for too few elements."""
        sizes = torch.tensor(list(self.sizes), device=target.device)
        columns = [target * direction, direction * direction, (direction != 0.0).to(target.dtype)]
        sums = [torch.segment_reduce(column, "sum", lengths=sizes, unsafe=True) for column in columns]
        found = torch.where(sums[2] >= _LEAST, sums[0] / sums[1], math.nan)
        return found.repeat_interleave(sizes)

    def _try_undecayed(self, found: list[Found]) -> None:
        """Record for each shard whether a step without decay gives all of its elements, up to rounding."""
        undecayed = self.kind.recompute(self.spec, replace(self.values, weight_decay=0.0))
        made = next(each for each in undecayed if each.name == self.right.name)
        allowed, _ = Rounding.of(self.dtypes).bound(made, self.start, self.actual)
        fits = (self.actual - made.expected).abs() <= allowed
        for each, part in zip(found, self._split(fits), strict=True):
            if bool(part.all()):
                each[_UNDECAYED,] = None

    def _fit_other_steps(self) -> list[bool]:
        """Return for each shard whether the bias corrections of another step give all of its elements."""
        found = [False] * len(self.sizes)
        if self.right.name != WEIGHT or Rounding.of(self.dtypes).unit > _EXACT:
            return found  # in 16 bits one of so many steps fits by chance
        sizes = torch.tensor(list(self.sizes), device=self.actual.device)
        for numbers in self._find_near_steps(sizes):
            expected = self.kind.correct_for(self.spec, self.values, numbers.repeat_interleave(sizes))
            if expected is None:
                break
            fits = (self.actual - expected).abs() <= self._bound(expected)
            parts = [bool(part.all()) for part in self._split(fits)]
            found = [one or other for one, other in zip(found, parts, strict=True)]
        return found

    def _find_near_steps(self, sizes: Tensor) -> Iterator[Tensor]:
        """Yield (S), the other steps whose corrections come closest on a few elements of each shard."""
        parts = torch.arange(_FEW, device=sizes.device) * sizes.unsqueeze(1) // _FEW
        places = (sizes.cumsum(0) - sizes).unsqueeze(1) + parts
        few = take_few(self.values, places.flatten())
        numbers = torch.arange(1, MOST_STEPS + 1, device=places.device).unsqueeze(1)
        expected = self.kind.correct_for(self.spec, few, numbers)
        if expected is None:
            return
        errors = (expected - self.actual[places.flatten()]).abs().view(-1, *places.shape).sum(dim=-1)
        errors[self.values.number - 1] = torch.inf
        yield from errors.argsort(dim=0)[:_NEAR_STEPS] + 1


@lru_cache(maxsize=64)  # each step has shards of the same sizes
def _choose(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Return the positions of a smaller sample of shards of these sizes, and its size per shard."""
    ends = list(accumulate(sizes))
    bounds = zip([0, *ends], ends, sizes, strict=False)
    places = [torch.arange(start, end, -(-size // MOST_OF_VARIANTS)) for start, end, size in bounds]
    return torch.cat(places).to(device, non_blocking=True), tuple(len(each) for each in places)


def _list_plain(parts: Mapping[str, Sequence[StepChange]]) -> Mapping[str, Sequence[StepChange]]:
    """Return the parts of a formula, with only the ways that are distinguishable in 16 bits."""
    return {
        name: ways if name in _PLAIN else [way for way in ways if way in _PLAIN_WAYS]
        for name, ways in parts.items()
    }


def _is_other(number: float | None, usual: float | None) -> bool:
    """Return whether a number was found and differs from the usual one."""
    if number is None or not math.isfinite(number):
        return False
    return usual is None or abs(number - usual) > _SAME * max(abs(usual), abs(number))


def take_few(values: StepValues, places: Tensor) -> StepValues:
    """Return the inputs of a step at some of its elements."""
    moments = [*values.before.values(), *values.after.values()]
    weight, gradient, *rest = _take([values.weight, values.gradient, *moments], places)
    return replace(
        values,
        weight=weight,
        gradient=gradient,
        before=dict(zip(values.before, rest, strict=False)),
        after=dict(zip(values.after, rest[len(values.before) :], strict=True)),
    )


def _take(vectors: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """Return some elements of vectors (N,) of one dtype, with one launch per `_ROOM` elements."""
    if not vectors:
        return []
    together = max(_ROOM // max(len(vectors[0]), 1), 1)
    found: list[Tensor] = []
    for start in range(0, len(vectors), together):
        some = vectors[start : start + together]
        found += torch.stack(list(some)).index_select(1, places) if len(some) > 1 else [some[0][places]]
    return found
