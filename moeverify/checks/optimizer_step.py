"""Whether each rank's optimizer made of its own gradient, moments and weights what the recipe's optimizer makes.

The comparison with the golden says little of an update below float64: the first step of Adam is nearly a sign, which
noise of the gradient turns. Here the noise plays no part: the step is computed again in float64 from the very values
that the rank had, so all that may differ is the rounding of the step itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.case.schema import Optimizer, Recipe
from moeverify.checks.base import Check, Outcome, RankRun, Role, Shown, Watch
from moeverify.compare.assembled import Key
from moeverify.compare.difference import find_worst
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import RecomputedFacts, TermFacts
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.place import Place, Stage
from moeverify.train.optimizer_kinds import OPTIMIZER, OptimizerKind
from moeverify.train.program import Program
from moeverify.train.recomputation import WEIGHT, Recomputed, StepValues
from moeverify.train.schedule import find_factor

MOST_ELEMENTS = 1 << 14
"""Of a larger shard, so many elements in equal distances are recomputed: a wrong step is wrong in many of them."""

_OWN = 2.0**-52  # twice the rounding of float64: of each term and of the sum

EXPLAINED = 0.02
"""The share of an error that a fit may leave to be reported; what is left besides is rounding."""


@dataclass(frozen=True)
class Row:
    """One recomputed tensor of one rank: `key` is its logical tensor, `terms` are (name, coefficient).

    `worst` is by how many times the allowed error one element is off, at most; `index` is its global index there.
    `gram` (T + 1, T + 1) are the products of the terms' values and, last, of the result, so that the coefficients
    that the rank used can be found by least squares. `sum_allowed2` and `sum_expected2` are sums of squares.
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
    gram: tuple[tuple[float, ...], ...]
    clip: float | None


@dataclass
class _Sampled:
    """What one step has of one parameter's shard, sampled and in float64; `dtypes` are those that it was in."""

    shard: LocalShard
    stride: int
    gradient: Tensor
    weight: Tensor | None = None
    change: Tensor | None = None
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)


@dataclass(frozen=True)
class _Batch:
    """Recomputed values of several shards in one, not yet read from the device.

    Shapes: `numbers` (N, 7 + (T + 1)**2) for N shards and T terms: see `_measure`.
    """

    step: int
    clip: Tensor | None
    members: Sequence[_Sampled]
    name: str
    terms: tuple[tuple[str, float], ...]
    numbers: Tensor


class OptimizerWatch(Watch[list[Row]]):
    """Samples what goes into each step and what comes out of it, and recomputes it when the step is over."""

    def __init__(self, recipe: Recipe, program: Program) -> None:
        self._recipe = recipe
        self._kind: OptimizerKind = OPTIMIZER.find(recipe.optimizer.name)
        self._program: Program | None = program
        self._shards: dict[tuple[str, str], LocalShard] = {}
        self._sampled: dict[tuple[str, str], _Sampled] = {}
        self._clip: Tensor | None = None
        self._step = -1
        self._batches: list[_Batch] = []

    def begin_step(self, step: int) -> None:
        """Recompute the step before; see `Watch`."""
        self._finish()
        self._step = step
        # A rank may have several shards of one parameter, those of experts that different ranks hold, and others in
        # the next step.
        shards = [] if self._program is None else self._program.shards
        self._shards = {(shard.name, shard.region.key): shard for shard in shards}

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Sample what belongs to the step of the optimizer; see `Watch`."""
        key = (name, region.key)
        if kind == Kind.GRADIENT and local is not None and key in self._shards:
            if region.numel:
                stride = -(-region.numel // MOST_ELEMENTS)
                self._sampled[key] = _Sampled(self._shards[key], stride, _sample(local, stride))
                self._sampled[key].dtypes.add(local.dtype)
        elif kind == Kind.GRADIENT_NORM and name == "total":
            self._sample_state()
        elif kind == Kind.GRADIENT_NORM and local is not None:
            self._clip = local.detach().to(torch.float64)
        elif kind == Kind.WEIGHT and local is not None and key in self._sampled:
            sampled = self._sampled[key]
            if sampled.weight is not None:
                sampled.change = _sample(local, sampled.stride) - sampled.weight
                sampled.dtypes.add(local.dtype)
        elif kind == Kind.OPTIMIZER_STATE and local is not None:
            self._keep_moment(name, local, region, after=True)

    def close(self) -> None:
        """Recompute the last step, and let go of the model; see `Watch`."""
        self._finish()
        self._program = None
        self._shards = {}

    def report(self) -> list[Row]:
        """Return the rows of all steps; see `Watch`."""
        return [row for batch in self._batches for row in _read_batch(batch)]

    def _sample_state(self) -> None:
        """Keep weights and moments as they are before the step."""
        assert self._program is not None
        for sampled in self._sampled.values():
            sampled.weight = _sample(sampled.shard.local(), sampled.stride)
        for name, local, region in self._program.engine.state(self._program.shards):
            self._keep_moment(name, local, region, after=False)

    def _keep_moment(self, name: str, local: Tensor, region: Region, *, after: bool) -> None:
        parameter, _, moment = name.rpartition(".")
        sampled = self._sampled.get((parameter, region.key))
        if sampled is None or moment not in self._kind.moments:
            return
        values = sampled.after if after else sampled.before
        values[moment] = _sample(local, sampled.stride)
        sampled.dtypes.add(local.dtype)

    def _finish(self) -> None:
        groups: dict[object, list[_Sampled]] = {}
        for sampled in self._sampled.values():
            if sampled.weight is not None and sampled.change is not None:
                groups.setdefault(_group_key(sampled), []).append(sampled)
        for members in groups.values():
            self._recompute(members)
        self._sampled = {}
        self._clip = None

    def _recompute(self, members: Sequence[_Sampled]) -> None:
        spec = self._recipe.optimizer
        first = members[0]
        gradient = torch.cat([each.gradient for each in members])
        values = StepValues(
            number=self._step + 1,
            lr=spec.lr * find_factor(spec, self._recipe.steps, self._step),
            weight_decay=_decay_of(spec, first.shard),
            weight=torch.cat([each.weight for each in members if each.weight is not None]),
            gradient=gradient if self._clip is None else gradient * self._clip.to(gradient.device),
            before={name: torch.cat([each.before[name] for each in members]) for name in first.before},
            after={name: torch.cat([each.after[name] for each in members]) for name in first.after},
        )
        change = torch.cat([each.change for each in members if each.change is not None])
        sizes = torch.tensor([len(each.gradient) for each in members], device=gradient.device)
        rounding = _Rounding.of(first.dtypes)
        for recomputed in self._kind.recompute(spec, values):
            is_weight = recomputed.name == WEIGHT
            actual = change if is_weight else values.after[recomputed.name]
            allowed = rounding.bound(recomputed, values.weight + change if is_weight else actual)
            numbers = _measure(recomputed, actual, allowed, sizes)
            terms = tuple((term.name, term.coefficient) for term in recomputed.terms)
            self._batches.append(_Batch(self._step, self._clip, members, recomputed.name, terms, numbers))
        for each in members:  # the rows need the shards' names and places alone
            each.weight = each.change = None
            each.before, each.after = {}, {}


def _sample(local: Tensor, stride: int) -> Tensor:
    """Return a copy of every `stride`-th element, in float64."""
    return local.detach().reshape(-1)[::stride].to(torch.float64, copy=True)


def _decay_of(spec: Optimizer, shard: LocalShard) -> float:
    """Return the weight decay of a parameter: that of the recipe for matrices, none for vectors."""
    return spec.weight_decay if len(shard.region.shape) > 1 else 0.0


def _group_key(sampled: _Sampled) -> object:
    """Return what is equal for shards that can be recomputed together."""
    decays = len(sampled.shard.region.shape) > 1
    names = (frozenset(sampled.before), frozenset(sampled.after))
    return decays, names, frozenset(sampled.dtypes), sampled.gradient.device


@dataclass(frozen=True)
class _Rounding:
    """The rounding of a dtype: half a unit in the last place of 1, and the smallest normal number.

    What is below that may be rounded to zero.
    """

    unit: float
    smallest: float

    @classmethod
    def of(cls, dtypes: Collection[torch.dtype]) -> _Rounding:
        """Return that of the coarsest dtype."""
        infos = [torch.finfo(dtype) for dtype in dtypes]
        return cls(0.5 * max(info.eps for info in infos), max(info.tiny for info in infos))

    def bound(self, recomputed: Recomputed, result: Tensor) -> Tensor:
        """Return the largest error (N,) that rounding can cause in each element of a result (N,) as it is stored."""
        # Half the distance of two numbers beside the result: frexp has mantissas in [0.5, 1).
        power = torch.ldexp(torch.ones_like(result), torch.frexp(result).exponent - 1)
        last = self.unit * torch.where(result == 0.0, 0.0, power)
        # The sums that it is compared with are rounded as well, to float64. Beyond the first order, n roundings
        # cause at most 1 / (1 - n * unit) times their sum: n is below 16.
        own = _OWN * (recomputed.rounded + result.abs())
        inner = self.unit / (1.0 - 16.0 * self.unit) * recomputed.rounded
        return last + inner + own + recomputed.smallest * self.smallest


def _measure(recomputed: Recomputed, actual: Tensor, allowed: Tensor, sizes: Tensor) -> Tensor:
    """Return (N, 7 + (T + 1)**2) for N shards and T terms, on the device of the values.

    Columns: place of the worst element in its shard, expected and actual there, its allowed error, its ratio of error
    to allowed error; then the sums of products of terms and actual values with each other, and of the squares of the
    allowed errors and of what was expected.
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
    products = [one * other for one in values for other in values] + [allowed * allowed, expected * expected]
    sums = torch.segment_reduce(torch.stack(products, dim=1), "sum", lengths=sizes, axis=0)
    return torch.cat([torch.stack(columns, dim=1), sums], dim=1)


def _read_batch(batch: _Batch) -> Iterator[Row]:
    """Yield the rows of a batch; waits for the device."""
    width = len(batch.terms) + 1
    clip = None if batch.clip is None else float(batch.clip)
    for sampled, row in zip(batch.members, batch.numbers.tolist(), strict=True):
        shard = sampled.shard
        place, expected, actual, allowed, worst = row[:5]
        products, (sum_allowed2, sum_expected2) = row[5:-2], row[-2:]
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
            gram=tuple(tuple(products[start : start + width]) for start in range(0, width * width, width)),
            clip=clip,
        )


class OptimizerStep(Check[list[Row]]):
    """Moments and updates of every step, against the step computed again in float64."""

    name = CheckName.OPTIMIZER_STEP
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: Program) -> Watch[list[Row]]:
        """Return what samples and recomputes each step of the optimizer; see `Check`."""
        return OptimizerWatch(run.case.recipe, program)

    def judge(self, shown: Shown, reports: Sequence[list[Row]]) -> Outcome | None:
        """Return whether each element is as the step gives it, up to rounding; see `Check`."""
        return judge_rows(shown, reports) if any(reports) else None


def judge_rows(shown: Shown, reports: Sequence[Sequence[Row]]) -> Outcome:
    """Return the verdict, with a finding for each logical tensor that is off, and what each could have shown."""
    by_key: dict[Key, list[tuple[int, Row]]] = {}
    for rank, rows in enumerate(reports):
        for row in rows:
            by_key.setdefault(row.key, []).append((rank, row))
    by_key = dict(sorted(by_key.items(), key=lambda item: item[0][0]))
    findings: list[Finding] = []
    limits: dict[Key, float] = {}
    for key, found in by_key.items():
        limits[key] = _find_limit([row for _, row in found])
        if not all(row.worst <= 1.0 for _, row in found):
            findings.append(_make_finding(shown, key, found))
    worst = max((row for found in by_key.values() for _, row in found), key=lambda row: _rate(row.worst))
    scale = _scale_of([worst])
    result = CheckResult(
        name=CheckName.OPTIMIZER_STEP,
        verdict="mismatch" if findings else "pass",
        tensors=len(by_key),
        worst=Worst(
            tensor=worst.key[2],
            error=worst.worst * worst.allowed / scale,
            bound=worst.allowed / scale,
            step=worst.key[0],
        ),
    )
    return Outcome(result, tuple(findings), limits)


def _rate(worst: float) -> float:
    return math.inf if math.isnan(worst) else worst


def _find_limit(rows: Sequence[Row]) -> float:
    """Return the relative error of a tensor from which on some element must be off by more than is allowed.

    An error larger than the allowed errors together, in the Frobenius norm, cannot be within them in each element.
    """
    expected = sum(row.sum_expected2 for row in rows)
    allowed = sum(row.sum_allowed2 for row in rows)
    return math.sqrt(allowed / expected) if expected > 0.0 else math.inf


def _scale_of(rows: Sequence[Row]) -> float:
    """Return the root mean square of what was expected, the unit of errors; 1 where all of it is zero."""
    total = sum(row.sum_expected2 for row in rows)
    count = sum(row.num_elements for row in rows)
    return math.sqrt(total / count) if total > 0.0 else 1.0


def _make_finding(shown: Shown, key: Key, rows: Sequence[tuple[int, Row]]) -> Finding:
    step, kind, name = key
    rank, row = max(rows, key=lambda each: _rate(each[1].worst))
    ranks = tuple(each for each, other in rows if not other.worst <= 1.0)
    scale = _scale_of([other for _, other in rows])
    error = abs(row.actual - row.expected) / scale
    facts = _fit(row)
    return Finding(
        check=CheckName.OPTIMIZER_STEP,
        kind=kind,
        tensor=name,
        step=step,
        rank=rank,
        ranks=ranks,
        coordinates=shown.place(rank),
        error=error if math.isfinite(error) else math.inf,
        bound=row.allowed / scale,
        index=row.index,
        expected=row.expected,
        actual=row.actual,
        code=Cause.NORM if facts.is_unclipped else Cause.OPTIMIZER,
        facts=facts,
        place=Place(ranks=ranks, stage=Stage.CLIP if facts.is_unclipped else Stage.OPTIMIZER_STEP),
    )


def _fit(row: Row) -> RecomputedFacts:
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
    # A term of little size takes up what the others leave: only what makes much of the error is off.
    effects = wrong.abs() * norms
    found = torch.where(effects >= 0.1 * effects.max(), found, expected)
    values: Mapping[int, float] = dict(zip(known, found.tolist(), strict=True))
    fitted = tuple(term.model_copy(update={"found": values.get(number)}) for number, term in enumerate(terms))
    return RecomputedFacts(terms=fitted, clip=row.clip)


def _quadratic(products: Tensor, coefficients: Tensor) -> float:
    return float(coefficients @ products @ coefficients)


CHECKS = (OptimizerStep(),)
