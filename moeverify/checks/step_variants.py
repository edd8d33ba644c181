"""By which other formulas a wrong result of an optimizer is made: those of its grammar, on a sample of elements.

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
"""Of a shard's elements so many, in equal distances, are compared with other formulas."""

MOST_STEPS = 1 << 10
"""Bias corrections of so many steps are tried, where an update is wrong."""

_NEAR_STEPS, _FEW = 8, 16
"""Of these steps so many, the nearest by a few elements, are compared in each element of a shard."""

_LEAST = 4
"""A number that is solved for is known of no fewer elements: any number fits one."""

_EXACT = 2.0**-24
"""The unit of rounding up to which formulas are told from each other: that of float32."""

_PLAIN = ("corrections", "decay")
"""The parts that are told from others in 16 bits, where an element has few values, which many formulas give."""

_PLAIN_WAYS = ("not-clipped", "clipped-by-value")
"""The ways of other parts that are, too: a gradient that is many times as large has other values."""

_UNDECAYED: StepChange = "no-decay-in-gradient"
"""What is told by its own rounding, and so in 16 bits too: that of a decay may be larger than all of the gradient."""

_ALLOWED = 4.0
"""How many times the squares that rounding may leave of a shard another formula may."""

_ROOM = 1 << 22
"""So many numbers are put side by side to take some of them in one launch."""

_SAME = 1e-3
"""Relative: a number that differs by less from the usual one is that."""

_MADE = "made"
"""What the one term of a formula that is compared as a whole is called."""

_MOST_ALIKE = 3
"""More formulas of as many changes that give the same say nothing."""

_SURE = 8.0
"""By how many times its error a coefficient may be off."""

Found = dict[Changes, float | None]
"""Of one shard, the formulas that give all of its elements, with the number of each that was solved for one."""


class Coefficient(NamedTuple):
    """A coefficient of a term, and by how much it may be off for being solved for."""

    value: float
    error: float = 0.0


@dataclass(frozen=True)
class Formulas:
    """A smaller sample of a result, to compare it with other formulas than its own where that does not give it.

    `right` and `actual` (E,) are what the step should have made of `values` and has made; `start` (E,) is what it is
    added to, zero for a moment; `sizes` (S) the numbers of the elements of each shard.
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
        """Return a smaller sample of shards of these `sizes`, of each result, without a wait for the device.

        `results` are what should come of `values`, each with the sum of its terms and what has come, (N,).
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
        zeros = torch.zeros_like(sampled.weight)  # what a moment is added to
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
        """Return the same of some elements."""
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
        """Return of each shard the formulas that give all of its elements, up to rounding; waits for the device.

        `wrong` (S) are the shards that the right one does not give. Two changes are tried where one is not enough,
        then three.
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
        """Return of each shard whether its terms with these coefficients (S, T) leave no more than rounding does.

        What is rounded on the way is as large as the terms are with these coefficients, not as by the right ones: a
        result that is far below the right one is not explained by nothing. Either each element is within its own
        rounding, or all of them together.
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
        """Return the shards without those that one coefficient explains, beside which no further change is any."""
        known: list[Found] = [{} for _ in self.sizes]
        for changes in grammar.list_known():
            self._try(known, grammar, changes)
        return [number for number in left if not known[number]]

    def _find_several(self, grammar: Grammar, left: Sequence[int], count: int) -> Mapping[int, Found]:
        """Return the formulas with `count` changes of the shards `left`; a few elements of each choose them."""
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
        """Note of each shard whether a formula with these changes gives it."""
        made = grammar.make(changes)
        errors = (self.actual - made.values).abs()
        # What divides by zero is allowed any error.
        errors = errors.where(made.values.isfinite(), torch.nan)
        # A sum that is squared, or a number that is solved for, is off by what rounding leaves of other elements.
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
        # Another formula has other intermediate results, which are as large as its result and the right one.
        rounded = self.right.rounded + 4.0 * (expected.abs() + self.right.expected.abs())
        variant = replace(self.right, terms=(Term(_MADE, 1.0, expected),), rounded=rounded)
        variant = variant if shrunk_by is None else replace(variant, shrunk_by=shrunk_by)
        allowed, _ = Rounding.of(self.dtypes).bound(variant, self.start, self.actual)
        return allowed

    def _split(self, values: Tensor) -> Iterable[Tensor]:
        return torch.split(values.cpu(), list(self.sizes))

    def _solve(self, target: Tensor, direction: Tensor) -> Tensor:
        """Return x (E) of `target = x * direction` by least squares, one for each shard; NaN of too few elements."""
        sizes = torch.tensor(list(self.sizes), device=target.device)
        columns = [target * direction, direction * direction, (direction != 0.0).to(target.dtype)]
        sums = [torch.segment_reduce(column, "sum", lengths=sizes, unsafe=True) for column in columns]
        found = torch.where(sums[2] >= _LEAST, sums[0] / sums[1], math.nan)
        return found.repeat_interleave(sizes)

    def _try_undecayed(self, found: list[Found]) -> None:
        """Note of each shard whether a step without a decay gives all of its elements, up to its own rounding."""
        undecayed = self.kind.recompute(self.spec, replace(self.values, weight_decay=0.0))
        made = next(each for each in undecayed if each.name == self.right.name)
        allowed, _ = Rounding.of(self.dtypes).bound(made, self.start, self.actual)
        fits = (self.actual - made.expected).abs() <= allowed
        for each, part in zip(found, self._split(fits), strict=True):
            if bool(part.all()):
                each[_UNDECAYED,] = None

    def _fit_other_steps(self) -> list[bool]:
        """Return of each shard whether the bias corrections of some other step give all of its elements."""
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
        """Yield (S), the other steps by whose corrections a few elements of each shard are nearest."""
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
    """Return the places of a smaller sample of shards of these sizes, and how many of each it takes."""
    ends = list(accumulate(sizes))
    bounds = zip([0, *ends], ends, sizes, strict=False)
    places = [torch.arange(start, end, -(-size // MOST_OF_VARIANTS)) for start, end, size in bounds]
    return torch.cat(places).to(device, non_blocking=True), tuple(len(each) for each in places)


def _list_plain(parts: Mapping[str, Sequence[StepChange]]) -> Mapping[str, Sequence[StepChange]]:
    """Return the parts of a formula with the ways that are told from others in 16 bits."""
    return {
        name: ways if name in _PLAIN else [way for way in ways if way in _PLAIN_WAYS]
        for name, ways in parts.items()
    }


def _is_other(number: float | None, usual: float | None) -> bool:
    """Return whether a number was found that is another one than the usual."""
    if number is None or not math.isfinite(number):
        return False
    return usual is None or abs(number - usual) > _SAME * max(abs(usual), abs(number))


def take_few(values: StepValues, places: Tensor) -> StepValues:
    """Return what a step works on at some of its elements."""
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
    """Return some elements of vectors (N,) of one dtype, in a launch for as many of these as `_ROOM` has room for."""
    if not vectors:
        return []
    together = max(_ROOM // max(len(vectors[0]), 1), 1)
    found: list[Tensor] = []
    for start in range(0, len(vectors), together):
        some = vectors[start : start + together]
        found += torch.stack(list(some)).index_select(1, places) if len(some) > 1 else [some[0][places]]
    return found
