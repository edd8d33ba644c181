"""Recomputation of an optimizer step in float64, from a rank's own values, for samples of its elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from moeverify.cases.schema import Optimizer
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.results.checks import Kind
from moeverify.results.step_facts import RecomputedFacts, TermFacts
from moeverify.train.optimizer_kinds import OptimizerKind
from moeverify.train.recomputation import WEIGHT, Recomputed, StepValues
from moeverify.verification.checks.narrower import list_narrower, name_dtype
from moeverify.verification.checks.step_rounding import OWN, DtypeRounding, Inexact
from moeverify.verification.compare.assembled import Key
from moeverify.verification.compare.difference import find_worst

# Maximum number of elements measured together: 16 MiB per float64 vector. A single result may exceed it.
_TOGETHER = 1 << 21

_SUMS = 1e-12  # relative error of sums of squares, and of differences between them


@dataclass(frozen=True)
class RecomputedTensor:
    """One recomputed tensor of one rank.

    - `key`: its logical tensor.
    - `terms`: (name, coefficient) of each term of the formula.
    - `worst`: the largest ratio of an element's error to its allowed error; `index` is its global index.
    - `gram`: (T + 1, T + 1), the products of the terms' values and, last, of the result. Least squares yields
      the coefficients that the rank used.
    - `sum_allowed2`, `sum_expected2`: sums of squares of the allowed errors and the expected values.
    - `sum_spread2`, `sum_stored2`: sums of squares of the distance between two results that may both be
      stored, and of the value that should be stored.
    - `rate`: the optimizer's learning rate, if known.
    - `rounded_to`: the narrower dtype to which the right result is rounded in all elements, if any.
    - `is_changed`: whether any element changed.
    - `number`: the steps of the parameter, counted from 1; only steps with a gradient count.
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
    number: int = 1


@dataclass
class Sampled:
    """Float64 samples of one parameter's shard in one step. `dtypes` are the original dtypes.

    `rate` is the learning rate of its optimizer group, if known. `number` counts the steps of the parameter
    from 1.
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
    number: int = 1


@dataclass(frozen=True)
class RecomputedBatch:
    """Recomputed values of several shards, not yet read from the device.

    Shapes: `numbers` (N, 10 + D + (T + 1)**2) for N shards, T terms and D `narrower` dtypes; see
    `_measure`.
    """

    step: int
    clip: Tensor | None
    members: Sequence[Sampled]
    name: str
    terms: tuple[tuple[str, float], ...]
    numbers: Tensor
    narrower: Sequence[torch.dtype] = ()


def sizes_of(members: Sequence[Sampled]) -> list[int]:
    """Return the number of recomputed elements of each shard."""
    return [len(each.gradient) for each in members]


def recompute(
    kind: OptimizerKind,
    spec: Optimizer,
    groups: Sequence[tuple[Sequence[Sampled], float]],
    *,
    step: int,
    lr: float,
    clip: Tensor | None = None,
) -> Iterator[RecomputedBatch]:
    """Yield the moments and updates of shards, compared with recomputed ones.

    `groups` are pairs of (shards, weight decay). The shards of a group share options, dtypes and the
    `number` of their step. `clip` is a coefficient not yet applied to the sampled gradients. Equal results
    of several groups are measured together, so that more groups do not cost more launches.
    """
    results: list[_Result] = []
    for members, weight_decay in groups:
        gradient = torch.cat([each.gradient for each in members])
        values = StepValues(
            number=members[0].number,
            lr=lr,
            weight_decay=weight_decay,
            weight=torch.cat([each.weight for each in members if each.weight is not None]),
            gradient=gradient if clip is None else gradient * clip.to(gradient.device),
            before={name: torch.cat([each.before[name] for each in members]) for name in members[0].before},
            after={name: torch.cat([each.after[name] for each in members]) for name in members[0].after},
        )
        results += _list_results(kind, spec, values, members)
        if sum(len(each.actual) for each in results) >= _TOGETHER:
            yield from _measure_all(results, step, clip)
            results = []
    yield from _measure_all(results, step, clip)


@dataclass(frozen=True)
class _Result:
    """Actual and recomputed result of a step for some shards. Shape: actual (N,)."""

    members: Sequence[Sampled]
    recomputed: Recomputed
    made: Inexact
    actual: Tensor

    @property
    def group_key(self) -> object:
        """Return the group key of results that can be measured together."""
        return frozenset(self.members[0].dtypes), self.actual.device, len(self.recomputed.terms)


def _list_results(
    kind: OptimizerKind, spec: Optimizer, values: StepValues, members: Sequence[Sampled]
) -> list[_Result]:
    """Return the results of a step for shards that share options and dtypes."""
    change = torch.cat([each.change for each in members if each.change is not None])
    zeros = torch.zeros_like(change)
    dtypes = members[0].dtypes
    rounding = DtypeRounding.of(dtypes)
    results = []
    for recomputed in kind.recompute(spec, values):
        is_weight = recomputed.name == WEIGHT
        made = rounding.describe(recomputed, recomputed.expected, values.weight if is_weight else zeros)
        actual = change if is_weight else values.after[recomputed.name]
        results.append(_Result(members, recomputed, made, actual))
    return results


def _measure_all(results: Sequence[_Result], step: int, clip: Tensor | None) -> Iterator[RecomputedBatch]:
    """Yield a batch for each result, in order."""
    measured: dict[int, Tensor] = {}
    for together in _group_results(results):
        some = [results[place] for place in together]
        rows = torch.split(_measure(some), [len(each.members) for each in some])
        measured |= dict(zip(together, rows, strict=True))
    for place, each in enumerate(results):
        terms = tuple((term.name, term.coefficient) for term in each.recomputed.terms)
        narrower = list_narrower(*each.members[0].dtypes)
        name, numbers = each.recomputed.name, measured[place]
        yield RecomputedBatch(step, clip, each.members, name, terms, numbers, narrower)


def _group_results(results: Sequence[_Result]) -> Iterator[list[int]]:
    """Yield the indices of results to measure together: equal in kind, at most `_TOGETHER` elements."""
    places: dict[object, list[int]] = {}
    for place, each in enumerate(results):
        places.setdefault(each.group_key, []).append(place)
    for equal in places.values():
        some, num_elements = list[int](), 0
        for place in equal:
            size = len(results[place].actual)
            if some and num_elements + size > _TOGETHER:
                yield some
                some, num_elements = [], 0
            some.append(place)
            num_elements += size
        yield some


def _count_others(
    start: Tensor, expected: Tensor, actual: Tensor, allowed: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return 1 for each element (N,) that is not the right result rounded to a narrower dtype, else 0."""
    result, wanted = start + actual, start + expected
    unit = torch.finfo(dtype).eps * torch.maximum(wanted.abs(), result.abs()) + torch.finfo(dtype).tiny
    # The result is a sum of parts that were separated before; float64 rounds both operations.
    own = 2.0 * OWN * torch.maximum(start.abs(), result.abs())
    is_representable = (result.to(dtype).to(result.dtype) - result).abs() <= own
    is_rounded = is_representable & ((result - wanted).abs() <= allowed + unit)
    return (~is_rounded).to(torch.float64)


def _measure(results: Sequence[_Result]) -> Tensor:
    """Return (N, 10 + D + (T + 1)**2) for N shards, T terms and D narrower dtypes, on their device.

    Columns, in order:

    - of the worst element: its place in its shard, expected and actual value, allowed error, and ratio of
      error to allowed error;
    - (T + 1)**2 sums of products of the terms and the actual values with each other;
    - sums of squares of the allowed errors, the expected values, the spreads of storable values, and the
      nearest ones;
    - the number of changed elements;
    - for each narrower dtype, the number of elements that are not the result rounded to it.
    """
    dtypes = results[0].members[0].dtypes
    made = Inexact.join([each.made for each in results])
    actual = _cat([each.actual for each in results])
    allowed, stored = DtypeRounding.of(dtypes).bound_joined(made, actual)
    expected = made.expected
    all_sizes = tuple(size for each in results for size in sizes_of(each.members))
    sizes, starts = _find_places(all_sizes, actual.device)
    ratio = (actual - expected).abs() / allowed
    worst = find_worst(ratio, sizes)
    columns = [
        (worst - starts).to(torch.float64),
        expected[worst],
        actual[worst],
        allowed[worst],
        ratio[worst],
    ]
    of_term = zip(*(each.recomputed.terms for each in results), strict=True)
    values = [*(_cat([term.values for term in terms]) for terms in of_term), actual]
    # The matrix is symmetric to the bit, so each product is computed once.
    pairs = [(one, other) for one in range(len(values)) for other in range(one, len(values))]
    products = [values[one] * values[other] for one, other in pairs]
    products += [each * each for each in (allowed, expected, stored.spread, stored.nearest)]
    products.append((actual != 0.0).to(actual.dtype))
    products += [
        _count_others(made.start, expected, actual, allowed, dtype) for dtype in list_narrower(*dtypes)
    ]
    # One long vector: for a matrix, torch reduces each segment of a column in a single GPU thread.
    lengths = sizes.repeat(len(products))
    sums = torch.segment_reduce(torch.cat(products), "sum", lengths=lengths, unsafe=True)
    rows = sums.view(len(products), -1).unbind()
    of_pair = dict(zip(pairs, rows, strict=False))
    grid = [(min(pair), max(pair)) for pair in product(range(len(values)), repeat=2)]
    return torch.stack([*columns, *(of_pair[pair] for pair in grid), *rows[len(pairs) :]], dim=1)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@lru_cache(maxsize=64)  # each step has shards of the same sizes
def _find_places(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each shard's size and start on the device, without synchronization."""
    lengths = torch.tensor(sizes)
    starts = lengths.cumsum(0) - lengths
    both = torch.stack([lengths, starts]).to(device, non_blocking=True)
    return both[0], both[1]


def read_batch(batch: RecomputedBatch) -> Iterator[RecomputedTensor]:
    """Yield the rows of a batch. Synchronizes with the device."""
    width = len(batch.terms) + 1
    clip = None if batch.clip is None else float(batch.clip)
    for sampled, row in zip(batch.members, batch.numbers.tolist(), strict=True):
        shard = sampled.shard
        place, expected, actual, allowed, worst = row[:5]
        size = 5 + width * width
        products = row[5:size]
        sum_allowed2, sum_expected2, sum_spread2, sum_stored2, num_changed = row[size : size + 5]
        fitting = [dtype for dtype, num in zip(batch.narrower, row[size + 5 :], strict=True) if num == 0.0]
        is_weight = batch.name == WEIGHT
        kind = Kind.UPDATE if is_weight else Kind.OPTIMIZER_STATE
        name = shard.name if is_weight else f"{shard.name}.{batch.name}"
        yield RecomputedTensor(
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
            number=sampled.number,
            rounded_to=name_dtype(fitting[0]) if fitting else "",
            is_changed=num_changed > 0.0,
        )


def fit(row: RecomputedTensor) -> RecomputedFacts:
    """Return the coefficients that explain a rank's result; none if no coefficients do."""
    terms = tuple(TermFacts(name=name, expected=coefficient) for name, coefficient in row.terms)
    unexplained = RecomputedFacts(terms=terms, clip=row.clip)
    solved = _solve(row)
    if solved is None:
        return unexplained
    expected = torch.tensor([row.terms[number][1] for number in solved.known], dtype=torch.float64)
    wrong = expected - solved.found
    error2 = _quadratic(solved.products, wrong)
    # The remainder may be rounding; a larger one means another formula. Most of the error must be
    # explained.
    if not solved.left2 <= min(row.sum_allowed2 + _SUMS * solved.total, 0.25 * error2):
        return unexplained
    # A small term absorbs the remainder of the others, so only terms with a large part of the error are
    # wrong. A term whose whole error may be rounding is not wrong either: a 16-bit weight is mostly its
    # value before decay.
    effects = wrong.abs() * solved.products.diagonal().sqrt()
    is_off = (effects >= 0.1 * effects.max()) & (effects.square() > row.sum_allowed2)
    found = torch.where(is_off | (effects == effects.max()), solved.found, expected)
    values: Mapping[int, float] = dict(zip(solved.known, found.tolist(), strict=True))
    # The remaining rounding error is equally large in each element, on average.
    spread = max(solved.left2, 0.0) / max(row.num_elements - len(solved.known), 1)
    variances = (spread * solved.inverse).clamp(min=0.0)
    errors = dict(zip(solved.known, variances.sqrt().tolist(), strict=True))
    fitted = tuple(
        term.model_copy(update={"found": values.get(number), "error": errors.get(number, 0.0)})
        for number, term in enumerate(terms)
    )
    return RecomputedFacts(terms=fitted, clip=row.clip)


@dataclass(frozen=True)
class _Solved:
    """Least-squares coefficients `found` (K) of the terms `known` (K), and the remaining squares.

    `products` (K, K) are the products of the terms. `inverse` (K) times the variance of an element is the
    variance of a coefficient.
    """

    known: Sequence[int]
    found: Tensor
    left2: float
    total: float
    products: Tensor
    inverse: Tensor


def _solve(row: RecomputedTensor) -> _Solved | None:
    """Return the least-squares coefficients of the rank's result; None if all terms are zero."""
    size = len(row.terms)
    gram = torch.tensor(row.gram, dtype=torch.float64)
    if not bool(torch.isfinite(gram).all()):
        return None
    # Zero terms (the moments of the first step) have no determinable coefficient.
    known = [number for number in range(size) if float(gram[number, number]) > 0.0]
    if not known:
        return None
    products, result, total = gram[known][:, known], gram[known, size], float(gram[size, size])
    norms = products.diagonal().sqrt()
    scaled = products / norms.outer(norms)
    solution = torch.linalg.lstsq(scaled, (result / norms).unsqueeze(1), driver="gelsd").solution
    found = solution.squeeze(1) / norms
    left2 = total - 2.0 * float(found @ result) + _quadratic(products, found)
    inverse = torch.linalg.pinv(scaled, hermitian=True).diagonal() / norms.square()
    return _Solved(known, found, left2, total, products, inverse)


def fit_rate(row: RecomputedTensor, factor: float) -> tuple[TermFacts, ...] | None:
    """Return the terms of an update whose rate is wrong by a factor; None if that does not explain it.

    The factor explains the update if the remainder is within the rounding of each element.
    """
    gram = torch.tensor(row.gram, dtype=torch.float64)
    if not bool(torch.isfinite(gram).all()):
        return None
    used = torch.tensor([factor * coefficient for _, coefficient in row.terms], dtype=torch.float64)
    products, result, total = gram[:-1, :-1], gram[:-1, -1], float(gram[-1, -1])
    tried2 = _quadratic(products, used)
    left2 = total - 2.0 * float(used @ result) + tried2
    # The remainder is a difference of sums of many squares, which float64 rounds as well.
    if not left2 <= allow(row, tried2) + _SUMS * total:
        return None
    return tuple(
        TermFacts(name=name, expected=coefficient, found=factor * coefficient)
        for name, coefficient in row.terms
    )


def allow(row: RecomputedTensor, tried2: float) -> float:
    """Return the squared error that rounding may leave of a result with squared sum `tried2`.

    A multiple of the right result has multiplied rounding errors. A smaller result may have terms as large
    as before.
    """
    return row.sum_allowed2 * max(1.0, tried2 / row.sum_expected2 if row.sum_expected2 > 0.0 else 1.0)


def _quadratic(products: Tensor, coefficients: Tensor) -> float:
    return float(coefficients @ products @ coefficients)
