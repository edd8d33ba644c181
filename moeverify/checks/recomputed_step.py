"""The step of an optimizer computed again in float64, from what a rank had and for samples of its elements."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from moeverify.case.schema import Optimizer
from moeverify.checks.narrower import list_narrower, name_dtype
from moeverify.compare.assembled import Key
from moeverify.compare.difference import find_worst
from moeverify.layout.local_shard import LocalShard
from moeverify.results.checks import Kind
from moeverify.results.step_facts import OTHER_STEP, RIGHT, RecomputedFacts, TermFacts
from moeverify.train.optimizer_kinds import OptimizerKind
from moeverify.train.recomputation import WEIGHT, Recomputed, StepValues, Term

_OWN = 2.0**-52  # twice the rounding of float64: of each term and of the sum

_SUMS = 1e-12  # of sums of squares, by which differences of them may be off

MOST_OF_VARIANTS = 1 << 8
"""Of a shard's elements so many, in equal distances, are compared with other formulas of the update."""

MOST_STEPS = 1 << 10
"""Bias corrections of so many steps are tried, where an update is wrong."""

_NEAR_STEPS, _FEW = 8, 16
"""Of these steps so many, the nearest by a few elements, are compared in each element of a shard."""

EXPLAINED = 0.02
"""The share of an error that a fit may leave to be reported; what is left besides is rounding."""


@dataclass(frozen=True)
class Row:
    """One recomputed tensor of one rank: `key` is its logical tensor, `terms` are (name, coefficient).

    `worst` is by how many times the allowed error one element is off, at most; `index` is its global index there.
    `gram` (T + 1, T + 1) are the products of the terms' values and, last, of the result, so that the coefficients
    that the rank used can be found by least squares. `sum_allowed2` and `sum_expected2` are sums of squares; so are
    `sum_spread2`, of how far apart two results are that both may be stored, and `sum_stored2`, of what should be.
    `rate` is the learning rate that the optimizer had, where that is known. `variants` are, of a wrong update,
    the formulas that give each element of a smaller sample, up to rounding. `rounded_to` is the narrower dtype in
    which all elements are what the right result is rounded to, if any, and `is_changed` whether any is not as before.
    """

    key: Key
    region: str
    terms: tuple[tuple[str, float], ...]
    worst: float
    index: tuple[int, ...]
    expected: float
    actual: float
    allowed: float
    num_elements: int
    sum_allowed2: float
    sum_expected2: float
    sum_spread2: float
    sum_stored2: float
    gram: tuple[tuple[float, ...], ...]
    clip: float | None
    rate: float | None = None
    rounded_to: str = ""
    is_changed: bool = True
    variants: tuple[str, ...] = ()


@dataclass
class Sampled:
    """What one step has of one parameter's shard, sampled and in float64; `dtypes` are those that it was in.

    `rate` is the learning rate of its group in the optimizer, where that is known.
    """

    shard: LocalShard
    stride: int
    gradient: Tensor
    weight: Tensor | None = None
    change: Tensor | None = None
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)
    rate: float | None = None


@dataclass(frozen=True)
class Formulas:
    """A smaller sample of an update, to compare it with other formulas than its own where that does not give it.

    `right` and `actual` (E,) are what the step should have made of `values` and has made; `sizes` the numbers of the
    elements of each shard.
    """

    kind: OptimizerKind
    spec: Optimizer
    values: StepValues
    right: Recomputed
    actual: Tensor
    dtypes: Collection[torch.dtype]
    sizes: Sequence[int]

    def find_fitting(self) -> list[tuple[str, ...]]:
        """Return of each shard the formulas that give all of its elements, up to rounding; waits for the device."""
        right, rounding = self.right.expected, Rounding.of(self.dtypes)
        formulas = {RIGHT: right, **self.kind.list_variants(self.spec, self.values)}
        fitting = []
        for name, expected in formulas.items():
            # Another formula has other intermediate results, which are as large as its result and the right one.
            rounded = self.right.rounded + 4.0 * (expected.abs() + right.abs())
            variant = replace(self.right, terms=(Term(name, 1.0, expected),), rounded=rounded)
            allowed, _ = rounding.bound(variant, self.values.weight, self.actual)
            fits = (self.actual - expected).abs() <= allowed
            fitting.append([bool(part.all()) for part in torch.split(fits.cpu(), list(self.sizes))])
        fitting.append(self._fit_other_steps(rounding))
        return [
            tuple(name for name, fits in zip((*formulas, OTHER_STEP), row, strict=True) if fits)
            for row in zip(*fitting, strict=True)
        ]

    def _fit_other_steps(self, rounding: Rounding) -> list[bool]:
        """Return of each shard whether the bias corrections of some other step give all of its elements."""
        right, sizes = self.right.expected, torch.tensor(self.sizes, device=self.actual.device)
        found = torch.zeros(len(sizes), dtype=torch.bool)
        for numbers in self._find_near_steps(sizes):
            expected = self.kind.correct_for(self.spec, self.values, numbers.repeat_interleave(sizes))
            if expected is None:
                break
            rounded = self.right.rounded + 4.0 * (expected.abs() + right.abs())
            variant = replace(self.right, terms=(Term(OTHER_STEP, 1.0, expected),), rounded=rounded)
            allowed, _ = rounding.bound(variant, self.values.weight, self.actual)
            fits = ((self.actual - expected).abs() <= allowed).cpu()
            found |= torch.stack([part.all() for part in torch.split(fits, list(self.sizes))])
        return [bool(fits) for fits in found]

    def _find_near_steps(self, sizes: Tensor) -> Tensor:
        """Return (K, S) of K other steps by whose corrections a few elements of each of S shards are nearest."""
        parts = torch.arange(_FEW, device=sizes.device) * sizes.unsqueeze(1) // _FEW
        places = (sizes.cumsum(0) - sizes).unsqueeze(1) + parts
        few = take_few(self.values, places.flatten())
        numbers = torch.arange(1, MOST_STEPS + 1, device=places.device).unsqueeze(1)
        expected = self.kind.correct_for(self.spec, few, numbers)
        if expected is None:
            return numbers[:1].expand(1, len(sizes))
        errors = (expected - self.actual[places.flatten()]).abs().view(-1, *places.shape).sum(dim=-1)
        errors[self.values.number - 1] = torch.inf
        return errors.argsort(dim=0)[:_NEAR_STEPS] + 1


@dataclass(frozen=True)
class Batch:
    """Recomputed values of several shards in one, not yet read from the device.

    Shapes: `numbers` (N, 10 + D + (T + 1)**2) for N shards, T terms and D `narrower` dtypes: see `_measure`. Of an
    update there are `formulas`.
    """

    step: int
    clip: Tensor | None
    members: Sequence[Sampled]
    name: str
    terms: tuple[tuple[str, float], ...]
    numbers: Tensor
    narrower: Sequence[torch.dtype] = ()
    formulas: Formulas | None = None


def take_few(values: StepValues, places: Tensor) -> StepValues:
    """Return what a step works on at some of its elements."""
    return replace(
        values,
        weight=values.weight[places],
        gradient=values.gradient[places],
        before={name: moment[places] for name, moment in values.before.items()},
        after={name: moment[places] for name, moment in values.after.items()},
    )


def recompute(
    kind: OptimizerKind,
    spec: Optimizer,
    members: Sequence[Sampled],
    *,
    step: int,
    number: int,
    lr: float,
    weight_decay: float,
    clip: Tensor | None = None,
) -> Iterator[Batch]:
    """Yield the moments and the update of shards that share options and dtypes, beside what the step should make.

    `number` counts the optimizer's steps from 1; `clip` is a coefficient that the sampled gradients lack.
    """
    first = members[0]
    gradient = torch.cat([each.gradient for each in members])
    values = StepValues(
        number=number,
        lr=lr,
        weight_decay=weight_decay,
        weight=torch.cat([each.weight for each in members if each.weight is not None]),
        gradient=gradient if clip is None else gradient * clip.to(gradient.device),
        before={name: torch.cat([each.before[name] for each in members]) for name in first.before},
        after={name: torch.cat([each.after[name] for each in members]) for name in first.after},
    )
    change = torch.cat([each.change for each in members if each.change is not None])
    sizes = torch.tensor([len(each.gradient) for each in members])
    sizes = sizes.to(gradient.device, non_blocking=True)  # made there, it would be waited for
    rounding = Rounding.of(first.dtypes)
    for recomputed in kind.recompute(spec, values):
        is_weight = recomputed.name == WEIGHT
        actual = change if is_weight else values.after[recomputed.name]
        start = values.weight if is_weight else torch.zeros_like(actual)
        allowed, stored = rounding.bound(recomputed, start, actual)
        narrower = list_narrower(*first.dtypes)
        others = [_count_others(start, recomputed.expected, actual, allowed, dtype) for dtype in narrower]
        numbers = _measure(recomputed, actual, allowed, stored, sizes, others)
        terms = tuple((term.name, term.coefficient) for term in recomputed.terms)
        formulas = _keep_few(kind, spec, members, values, recomputed, change) if is_weight else None
        yield Batch(step, clip, members, recomputed.name, terms, numbers, narrower, formulas)


def _keep_few(
    kind: OptimizerKind,
    spec: Optimizer,
    members: Sequence[Sampled],
    values: StepValues,
    recomputed: Recomputed,
    change: Tensor,
) -> Formulas:
    """Return a smaller sample of an update, without a wait for the device."""
    strides = [-(-len(each.gradient) // MOST_OF_VARIANTS) for each in members]
    starts = [0, *accumulate(len(each.gradient) for each in members)]
    bounds = zip(starts, starts[1:], strides, strict=False)
    places = [torch.arange(start, end, stride) for start, end, stride in bounds]
    chosen = torch.cat(places).to(change.device, non_blocking=True)

    def take(tensor: Tensor) -> Tensor:
        return tensor[chosen]

    few = take_few(values, chosen)
    right = replace(
        recomputed,
        terms=(Term(RIGHT, 1.0, take(recomputed.expected)),),
        rounded=take(recomputed.rounded),
        options=recomputed.options if isinstance(recomputed.options, float) else take(recomputed.options),
    )
    sizes = tuple(len(each) for each in places)
    return Formulas(kind, spec, few, right, take(change), members[0].dtypes, sizes)


def _count_others(
    start: Tensor, expected: Tensor, actual: Tensor, allowed: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return 1 for each element (N,) that is not what the right result is rounded to in a narrower dtype, else 0."""
    result, wanted = start + actual, start + expected
    unit = torch.finfo(dtype).eps * torch.maximum(wanted.abs(), result.abs()) + torch.finfo(dtype).tiny
    # The result is a sum again of what was taken apart: float64 rounds both.
    own = 2.0 * _OWN * torch.maximum(start.abs(), result.abs())
    is_representable = (result.to(dtype).to(result.dtype) - result).abs() <= own
    is_rounded = is_representable & ((result - wanted).abs() <= allowed + unit)
    return (~is_rounded).to(torch.float64)


@dataclass(frozen=True)
class Rounding:
    """The rounding of a dtype: half a unit in the last place of 1, and the smallest normal number.

    What is below that may be rounded to zero. `arithmetic` is the unit of what kernels compute in for that dtype, and
    `dtype` the coarsest one, None where tensors have several.
    """

    unit: float
    smallest: float
    arithmetic: float
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, dtypes: Collection[torch.dtype]) -> Rounding:
        """Return that of the coarsest dtype."""
        infos = [torch.finfo(dtype) for dtype in dtypes]
        unit = 0.5 * max(info.eps for info in infos)
        arithmetic = min(unit, 0.5 * torch.finfo(torch.float32).eps)
        (dtype,) = dtypes if len(dtypes) == 1 else (None,)
        return cls(unit, max(info.tiny for info in infos), arithmetic, dtype)

    def bound(self, recomputed: Recomputed, start: Tensor, actual: Tensor) -> tuple[Tensor, Stored]:
        """Return the largest error (N,) that rounding can cause in each element of a result, and what may be stored.

        Shapes: `start` (N,) is what the result is added to before it is stored, zero for a moment; `actual` (N,).
        """
        result, wanted = start + actual, start + recomputed.expected
        # Half the distance of two numbers beside the result: frexp has mantissas in [0.5, 1).
        mantissa, exponent = torch.frexp(result)
        last = self.unit * torch.where(result == 0.0, 0.0, torch.ldexp(torch.ones_like(result), exponent - 1))
        # Below a power of two numbers are twice as dense.
        is_from_below = (mantissa.abs() == 0.5) & (wanted.abs() < result.abs())
        last = torch.where(is_from_below, 0.5 * last, last)
        # The sums that it is compared with are rounded as well, to float64. Beyond the first order, n roundings
        # cause at most 1 / (1 - n * unit) times their sum: n is below 16.
        own = _OWN * (recomputed.rounded + result.abs())
        inner = self.unit / (1.0 - 16.0 * self.unit) * recomputed.rounded
        inner = inner + self.arithmetic / (1.0 - 16.0 * self.arithmetic) * recomputed.options
        inner = inner + own + recomputed.smallest * self.smallest
        least, most = self._shrink(recomputed, start)
        shrunk = torch.where(result > wanted, most, -least)
        return last + inner + shrunk, self._store(start, wanted, least - inner, most + inner)

    def _shrink(self, recomputed: Recomputed, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the most (N,) that rounding adds to what is multiplied before the step is taken."""
        least = most = torch.zeros_like(start)
        if recomputed.shrunk_by is None:
            return least, most
        if self.dtype is None or self.unit == self.arithmetic:
            rounded = 2.0 * self.unit / (1.0 - 16.0 * self.unit) * start.abs()
            return -rounded, rounded
        # Each kernel takes one of these ways, up to its arithmetic: of the factor, the product and the difference.
        right, own = recomputed.shrunk_by * start, 3.0 * self.arithmetic * start.abs()
        for factor in (recomputed.shrunk_by, float(torch.tensor(recomputed.shrunk_by, dtype=self.dtype))):
            product = factor * start
            for shrunk in (product, product.to(self.dtype).to(start.dtype)):
                least, most = torch.minimum(least, shrunk - right), torch.maximum(most, shrunk - right)
        return least - own, most + own

    def _store(self, start: Tensor, wanted: Tensor, least: Tensor, most: Tensor) -> Stored:
        """Return what may be stored of a result that is off by `least` to `most` (N,) before its last rounding.

        Rounding keeps the order of numbers, so that it is between what the least and the most are rounded to. Where
        these are one number, an element that is right has it.
        """
        if self.dtype is None:
            return Stored(torch.full_like(wanted, torch.inf), wanted - start)
        sums = (wanted + least, wanted + most, wanted)
        low, high, middle = (each.to(self.dtype).to(wanted.dtype) for each in sums)
        return Stored(high - low, middle - start)


@dataclass(frozen=True)
class Stored:
    """Of each element, how far apart two results are that may both be stored, and the nearest one. Shapes: (N,)."""

    spread: Tensor
    nearest: Tensor


def _measure(
    recomputed: Recomputed,
    actual: Tensor,
    allowed: Tensor,
    stored: Stored,
    sizes: Tensor,
    others: Sequence[Tensor],
) -> Tensor:
    """Return (N, 10 + D + (T + 1)**2) for N shards, T terms and D `others`, on the device of the values.

    Columns: place of the worst element in its shard, expected and actual there, its allowed error, its ratio of error
    to allowed error; then the sums of products of terms and actual values with each other, and of the squares of the
    allowed errors, of what was expected, and of the spread of what may be stored and of the nearest of it; then how
    many elements have changed, and how many are not what each narrower dtype gives.
    """
    expected = recomputed.expected
    ratio = (actual - expected).abs() / allowed
    worst = find_worst(ratio, sizes)
    starts = sizes.cumsum(0) - sizes
    columns = [
        (worst - starts).to(torch.float64),
        expected[worst],
        actual[worst],
        allowed[worst],
        ratio[worst],
    ]
    values = [term.values for term in recomputed.terms] + [actual]
    squared = [allowed, expected, stored.spread, stored.nearest]
    products = [one * other for one in values for other in values] + [each * each for each in squared]
    products += [(actual != 0.0).to(actual.dtype), *others]
    # One long vector: of a matrix, torch reduces each segment of a column in one thread of a GPU.
    lengths = sizes.repeat(len(products))
    sums = torch.segment_reduce(torch.cat(products), "sum", lengths=lengths, unsafe=True)
    sums = sums.view(len(products), -1)
    return torch.cat([torch.stack(columns, dim=1), sums.T], dim=1)


def read_batch(batch: Batch) -> Iterator[Row]:
    """Yield the rows of a batch; waits for the device."""
    width = len(batch.terms) + 1
    clip = None if batch.clip is None else float(batch.clip)
    rows = batch.numbers.tolist()
    variants: Sequence[tuple[str, ...]] = [()] * len(rows)
    if batch.formulas is not None and not all(row[4] <= 1.0 for row in rows):
        variants = batch.formulas.find_fitting()
    for sampled, row, fitted in zip(batch.members, rows, variants, strict=True):
        shard = sampled.shard
        place, expected, actual, allowed, worst = row[:5]
        size = 5 + width * width
        products = row[5:size]
        sum_allowed2, sum_expected2, sum_spread2, sum_stored2, num_changed = row[size : size + 5]
        fitting = [dtype for dtype, num in zip(batch.narrower, row[size + 5 :], strict=True) if num == 0.0]
        is_weight = batch.name == WEIGHT
        kind = Kind.UPDATE if is_weight else Kind.OPTIMIZER_STATE
        name = shard.name if is_weight else f"{shard.name}.{batch.name}"
        yield Row(
            key=(batch.step, kind, name),
            region=shard.region.key,
            terms=batch.terms,
            worst=worst,
            index=shard.region.global_index(int(place) * sampled.stride),
            expected=expected,
            actual=actual,
            allowed=allowed,
            num_elements=len(sampled.gradient),
            sum_allowed2=sum_allowed2,
            sum_expected2=sum_expected2,
            sum_spread2=sum_spread2,
            sum_stored2=sum_stored2,
            gram=tuple(tuple(products[start : start + width]) for start in range(0, width * width, width)),
            clip=clip,
            rate=sampled.rate,
            rounded_to=name_dtype(fitting[0]) if fitting else "",
            is_changed=num_changed > 0.0,
            variants=fitted,
        )


def fit(row: Row) -> RecomputedFacts:
    """Return the coefficients that explain what the rank computed, or none where no coefficients do."""
    size = len(row.terms)
    gram = torch.tensor(row.gram, dtype=torch.float64)
    terms = tuple(TermFacts(name=name, expected=coefficient) for name, coefficient in row.terms)
    unexplained = RecomputedFacts(terms=terms, clip=row.clip)
    if not bool(torch.isfinite(gram).all()):
        return unexplained
    products, result, total = gram[:size, :size], gram[:size, size], float(gram[size, size])
    # Terms without any values (the moments of the first step) have no coefficient that could be known.
    known = [number for number in range(size) if float(products[number, number]) > 0.0]
    if not known:
        return unexplained
    chosen = torch.tensor(known)
    norms = products[chosen, chosen].sqrt()
    scaled = products[chosen][:, chosen] / norms.outer(norms)
    solution = torch.linalg.lstsq(scaled, (result[chosen] / norms).unsqueeze(1), driver="gelsd").solution
    found = solution.squeeze(1) / norms
    expected = torch.tensor([row.terms[number][1] for number in known], dtype=torch.float64)
    wrong = expected - found
    error2 = _quadratic(products[chosen][:, chosen], wrong)
    left2 = total - 2.0 * float(found @ result[chosen]) + _quadratic(products[chosen][:, chosen], found)
    # What is left may be rounding, uniform between its limits; but most of the error must be explained.
    if not left2 <= min(EXPLAINED * error2 + row.sum_allowed2 / 3.0, 0.25 * error2):
        return unexplained
    # A term of little size takes up what the others leave: only what makes much of the error is off. Nor is it a term
    # whose whole error may be rounding: a weight in 16 bits is mostly what it was before its decay.
    effects = wrong.abs() * norms
    is_off = (effects >= 0.1 * effects.max()) & (effects.square() > row.sum_allowed2)
    found = torch.where(is_off | (effects == effects.max()), found, expected)
    values: Mapping[int, float] = dict(zip(known, found.tolist(), strict=True))
    # What rounding leaves is as large in each element as in the others, on average.
    spread = max(left2, 0.0) / max(row.num_elements - len(known), 1)
    inverse = torch.linalg.pinv(scaled, hermitian=True).diagonal() / norms.square()
    errors = dict(zip(known, (spread * inverse).clamp(min=0.0).sqrt().tolist(), strict=True))
    fitted = tuple(
        term.model_copy(update={"found": values.get(number), "error": errors.get(number, 0.0)})
        for number, term in enumerate(terms)
    )
    return RecomputedFacts(terms=fitted, clip=row.clip)


def fit_rate(row: Row, factor: float) -> tuple[TermFacts, ...] | None:
    """Return the terms of an update with a learning rate that is so many times the right one, where these explain it.

    They do where no more is left than rounding may leave in each element.
    """
    gram = torch.tensor(row.gram, dtype=torch.float64)
    if not bool(torch.isfinite(gram).all()):
        return None
    used = torch.tensor([factor * coefficient for _, coefficient in row.terms], dtype=torch.float64)
    products, result, total = gram[:-1, :-1], gram[:-1, -1], float(gram[-1, -1])
    left2 = total - 2.0 * float(used @ result) + _quadratic(products, used)
    # What is left is a difference of sums of many squares, which float64 rounds as well.
    if not left2 <= row.sum_allowed2 + _SUMS * total:
        return None
    return tuple(
        TermFacts(name=name, expected=coefficient, found=factor * coefficient)
        for name, coefficient in row.terms
    )


def _quadratic(products: Tensor, coefficients: Tensor) -> float:
    return float(coefficients @ products @ coefficients)
