"""Check each rank's optimizer step, recomputed from its own gradient, moments and weights.

Below float64 the comparison with the golden has loose bounds for updates: the first step of Adam is nearly
a sign, and noise of the gradient may flip it. This check is independent of that noise. It recomputes the
step in float64 from the rank's own values, so that the only difference is the rounding of the step itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.cases.schema import Optimizer, Recipe
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.observer import Named
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.place import Place, Stage
from moeverify.results.step_facts import RecomputedFacts
from moeverify.train.custom_step import list_parameter_rates
from moeverify.train.engine import PlainEngine
from moeverify.train.optimizer_kinds import OPTIMIZER, OptimizerKind
from moeverify.train.program import TrainingProgram
from moeverify.train.schedule import find_factor, list_rates
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    rate_error,
)
from moeverify.verification.checks.recomputed_step import (
    RecomputedBatch,
    RecomputedTensor,
    Sampled,
    fit,
    fit_rate,
    read_batch,
    recompute,
)
from moeverify.verification.checks.sampling import find_stride, sample_all
from moeverify.verification.compare.assembled import Key

Whole = tuple[str, Tensor, Region]


@dataclass
class _State:
    """Samples of one shard before a step: its weight, and its moments by name."""

    weight: Tensor
    moments: dict[str, Tensor] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)


class OptimizerWatch(Watch[list[RecomputedTensor]]):
    """Samples the inputs and results of each step, and recomputes the step when it is over."""

    def __init__(self, recipe: Recipe, program: TrainingProgram) -> None:
        self._recipe = recipe
        self._kind: OptimizerKind = OPTIMIZER.find(recipe.optimizer.name)
        self._program: TrainingProgram | None = program
        self._shards: dict[tuple[str, str], LocalShard] = {}
        self._sampled: dict[tuple[str, str], Sampled] = {}
        self._clip: Tensor | None = None
        self._early: dict[tuple[str, str], _State] = {}
        # Number of steps each shard has taken, which are those with a gradient. The optimizer's own
        # counters are not read: a wrong counter would then go unnoticed.
        self._num_taken: dict[tuple[str, str], int] = {}
        self._stepped: set[tuple[str, str]] = set()
        self._step = -1
        self._batches: list[RecomputedBatch] = []

    def begin_step(self, step: int) -> None:
        """Recompute the previous step; see `Watch`."""
        self._finish()
        self._step = step
        # A rank may have several shards of one parameter, for experts held by different ranks. They may
        # change from step to step.
        shards = [] if self._program is None else self._program.live_shards()
        self._shards = {(shard.name, shard.region.key): shard for shard in shards}
        self._count_new_shards(step)
        if self._program is not None and self._program.custom_step is not None:
            self._early = self._read_state(self._shards)  # it shows its gradients after the step

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Sample a tensor of the optimizer step; see `Watch`."""
        self.observe_all(step, kind, [(name, local, region)])

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        """Sample tensors of the optimizer step; see `moeverify.parallel.regions.observer.BulkObserver`."""
        found = [(name, local, region) for name, local, region in shown if local is not None]
        if kind == Kind.GRADIENT:
            self._keep_gradients(found)
        elif kind == Kind.GRADIENT_NORM:
            for name, local, _ in found:
                if name == "total":
                    self._sample_state()
                else:
                    self._clip = local.detach().to(torch.float64)
        elif kind == Kind.WEIGHT:
            self._keep_changes(found)
        elif kind == Kind.OPTIMIZER_STATE:
            self._keep_moments(found)

    def close(self) -> None:
        """Recompute the last step and release the model; see `Watch`."""
        self._finish()
        self._program = None
        self._shards = {}

    def report(self) -> list[RecomputedTensor]:
        """Return the rows of all steps; see `Watch`."""
        return [row for batch in self._batches for row in read_batch(batch)]

    def _sample_state(self) -> None:
        """Keep weights and moments from before the step."""
        if self._early:
            return
        states = self._read_state({key: each.shard for key, each in self._sampled.items()})
        for key, state in states.items():
            self._take_state(self._sampled[key], state)
        self._note_rates()

    def _note_rates(self) -> None:
        """Keep the optimizer's learning rates. A framework's own optimizer does not expose them."""
        assert self._program is not None
        engine = self._program.engine
        if isinstance(engine, PlainEngine):
            rates = list_parameter_rates(engine.optimizer)
            for sampled in self._sampled.values():
                sampled.rate = rates.get(id(sampled.shard.tensor))

    def _read_state(self, shards: Mapping[tuple[str, str], LocalShard]) -> dict[tuple[str, str], _State]:
        """Return samples of the current weights and moments of these shards."""
        assert self._program is not None
        chosen = [(key, shard) for key, shard in shards.items() if shard.region.numel]
        moments = []
        for name, local, region in self._program.engine.state(self._program.shards):
            parameter, _, moment = name.rpartition(".")
            key = (parameter, region.key)
            if key in shards and region.numel and moment in self._kind.moments:
                moments.append((key, moment, local, find_stride(region)))
        samples = sample_all(
            [(shard.local(), find_stride(shard.region)) for _, shard in chosen]
            + [(local, stride) for _, _, local, stride in moments]
        )
        found = {key: _State(weight) for (key, _), weight in zip(chosen, samples, strict=False)}
        for (key, moment, local, _), values in zip(moments, samples[len(chosen) :], strict=True):
            found[key].moments[moment] = values
            found[key].dtypes.add(local.dtype)
        return found

    def _take_state(self, sampled: Sampled, state: _State) -> None:
        sampled.weight, sampled.before = state.weight, state.moments
        sampled.dtypes |= state.dtypes

    def _keep_gradients(self, shown: Sequence[Whole]) -> None:
        """Keep the gradients of a step. A user's own step is over by then, and its rates are known."""
        custom = None if self._program is None else self._program.custom_step
        keys = [(name, region.key) for name, _, region in shown]
        self._stepped.update(key for key in keys if key in self._shards)
        chosen = [
            (key, local, find_stride(region))
            for key, (_, local, region) in zip(keys, shown, strict=True)
            if key in self._shards and region.numel
        ]
        samples = sample_all([(local, stride) for _, local, stride in chosen])
        for (key, local, stride), gradient in zip(chosen, samples, strict=True):
            self._sampled[key] = Sampled(
                self._shards[key], stride, gradient, dtypes={local.dtype}, number=self._num_taken[key] + 1
            )
            if key in self._early:
                self._take_state(self._sampled[key], self._early[key])
            if custom is not None:
                self._sampled[key].rate = custom.rates.get(id(self._shards[key].tensor))

    def _count_new_shards(self, step: int) -> None:
        """Start the step counts of shards that are new on this rank, such as moved experts.

        They continue the count of their parameter.
        """
        known = dict(self._num_taken)
        for key in self._shards:
            if key not in known:
                of_name = [number for (name, _), number in known.items() if name == key[0]]
                self._num_taken[key] = max(of_name, default=step)

    def _keep_changes(self, shown: Sequence[Whole]) -> None:
        """Keep the changes of the weights since they were sampled before the step."""
        chosen = [(self._sampled.get((name, region.key)), local) for name, local, region in shown]
        changed = [(each, each.weight, local) for each, local in chosen if each and each.weight is not None]
        if not changed:
            return
        samples = sample_all([(local, each.stride) for each, _, local in changed])
        changes = torch._foreach_sub(samples, [weight for _, weight, _ in changed])
        for (each, _, local), change in zip(changed, changes, strict=True):
            each.change = change
            each.dtypes.add(local.dtype)

    def _keep_moments(self, shown: Sequence[Whole]) -> None:
        """Keep the moments after the step."""
        chosen = []
        for name, local, region in shown:
            parameter, _, moment = name.rpartition(".")
            sampled = self._sampled.get((parameter, region.key))
            if sampled is not None and moment in self._kind.moments:
                chosen.append((sampled, moment, local))
        samples = sample_all([(local, sampled.stride) for sampled, _, local in chosen])
        for (sampled, moment, local), values in zip(chosen, samples, strict=True):
            sampled.after[moment] = values
            sampled.dtypes.add(local.dtype)

    def _finish(self) -> None:
        groups: dict[object, list[Sampled]] = {}
        for sampled in self._sampled.values():
            if sampled.weight is not None and sampled.change is not None:
                groups.setdefault(_group_key(sampled), []).append(sampled)
        self._recompute(
            [(members, _decay_of(self._recipe.optimizer, members[0].shard)) for members in groups.values()]
        )
        for key in self._stepped:
            self._num_taken[key] += 1
        self._sampled, self._stepped = {}, set()
        self._clip = None

    def _recompute(self, groups: Sequence[tuple[Sequence[Sampled], float]]) -> None:
        spec = self._recipe.optimizer
        self._batches += recompute(
            self._kind,
            spec,
            groups,
            step=self._step,
            lr=spec.lr * find_factor(spec, self._recipe.steps, self._step),
            clip=self._clip,
        )
        for members, _ in groups:
            for each in members:  # the rows need only the names and places of the shards
                each.weight = each.change = None
                each.before, each.after = {}, {}


def _decay_of(spec: Optimizer, shard: LocalShard) -> float:
    """Return the weight decay of a parameter: the recipe's for matrices, zero for vectors."""
    return spec.weight_decay if len(shard.region.shape) > 1 else 0.0


def _group_key(sampled: Sampled) -> object:
    """Return the group key of shards that can be recomputed together."""
    decays = len(sampled.shard.region.shape) > 1
    names = (frozenset(sampled.before), frozenset(sampled.after))
    return decays, names, sampled.number, frozenset(sampled.dtypes), sampled.gradient.device


class OptimizerStep(Check[list[RecomputedTensor]]):
    """Moments and updates of every step, against the step recomputed in float64."""

    name = CheckName.OPTIMIZER_STEP
    role = Role.ORIGIN
    recomputes_step = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[list[RecomputedTensor]]:
        """Return a watch that samples and recomputes each optimizer step; see `Check`."""
        return OptimizerWatch(run.case.recipe, program)

    def judge(self, shown: ShownTensors, reports: Sequence[list[RecomputedTensor]]) -> CheckOutcome | None:
        """Return whether each element matches the recomputed step, up to rounding; see `Check`."""
        recipe = shown.case.recipe
        rates = list_rates(recipe.optimizer, recipe.steps)
        return judge_rows(shown, reports, rates) if any(reports) else None


def judge_rows(
    shown: ShownTensors, reports: Sequence[Sequence[RecomputedTensor]], rates: Sequence[float] = ()
) -> CheckOutcome:
    """Return the verdict, with a finding for each wrong logical tensor, and the detection limits.

    `rates` are the recipe's learning rates, by step.
    """
    own = shown.list_own(CheckName.OPTIMIZER_STEP)
    by_key = _sort_rows(reports, own)
    findings: list[Finding] = []
    limits: dict[Key, float] = {}
    for key, found in by_key.items():
        limits[key] = _find_limit([row for _, row in found])
        if any(_rate(row) > 1.0 for _, row in found):
            findings.append(_make_finding(shown, key, found, rates))
    rows = [row for found in by_key.values() for _, row in found]
    result = CheckResult(
        name=CheckName.OPTIMIZER_STEP,
        verdict="mismatch" if findings else "pass",
        tensors=len(by_key),
        worst=_find_worst(rows),
        facts=shown.describe_own({name for _, name in own}),
    )
    return CheckOutcome(result, tuple(findings), limits)


def _sort_rows(
    reports: Sequence[Sequence[RecomputedTensor]], own: Collection[tuple[str, str]]
) -> dict[Key, list[tuple[int, RecomputedTensor]]]:
    """Return the rows of each logical tensor with their ranks, ordered by step, without `own` results."""
    by_key: dict[Key, list[tuple[int, RecomputedTensor]]] = {}
    for rank, rows in enumerate(reports):
        for row in rows:
            if row.key[1:] not in own:
                by_key.setdefault(row.key, []).append((rank, row))
    return dict(sorted(by_key.items(), key=lambda item: item[0][0]))


def _find_worst(rows: Sequence[RecomputedTensor]) -> Worst | None:
    """Return the element with the largest error; None if no expected value is finite."""
    worst = max(filter(_is_known, rows), key=_rate, default=None)
    if worst is None:
        return None
    bound = worst.allowed / _scale_of([worst])
    return Worst(tensor=worst.key[2], error=worst.worst * bound, bound=bound, step=worst.key[0])


def _rate(row: RecomputedTensor) -> float:
    """Return the ratio of the largest error to the allowed one; 0 if the expected value is not finite."""
    return rate_error(row.worst) if _is_known(row) else 0.0


def _is_known(row: RecomputedTensor) -> bool:
    return math.isfinite(row.expected)


def _find_limit(rows: Sequence[RecomputedTensor]) -> float:
    """Return the relative error of a tensor above which some element must exceed its allowed error.

    If the error has a larger Frobenius norm than the allowed errors, some element exceeds its own. The same
    holds for stored values and spreads. Where rounding of a right element leaves only one stored value, any
    other value is detected. This holds even if half a unit of a 16-bit weight is half of its update.
    """
    shares = (
        (sum(row.sum_allowed2 for row in rows), sum(row.sum_expected2 for row in rows)),
        (sum(row.sum_spread2 for row in rows), sum(row.sum_stored2 for row in rows)),
    )
    return min((math.sqrt(left / whole) for left, whole in shares if whole > 0.0), default=math.inf)


def _scale_of(rows: Sequence[RecomputedTensor]) -> float:
    """Return the root mean square of the expected values, the unit of errors; 1 if all are zero."""
    total = sum(row.sum_expected2 for row in rows)
    count = sum(row.num_elements for row in rows)
    return math.sqrt(total / count) if total > 0.0 else 1.0


def _make_finding(
    shown: ShownTensors, key: Key, rows: Sequence[tuple[int, RecomputedTensor]], rates: Sequence[float]
) -> Finding:
    rank, row = max(rows, key=lambda each: _rate(each[1]))
    ranks = tuple(each for each, other in rows if _rate(other) > 1.0)
    scale = _scale_of([other for _, other in rows])
    facts = _add_rate(fit(row), row, rates)
    dtypes = {each.rounded_to for _, each in rows}
    if len(dtypes) == 1 and row.rounded_to:
        is_sure = any(each.is_changed for _, each in rows)
        facts = facts.model_copy(update={"rounded_to": row.rounded_to, "is_rounding_sure": is_sure})
    wrong = [each for _, each in rows if _rate(each) > 1.0]
    if key[1] == Kind.UPDATE and not facts.is_of_rate and not any(each.is_changed for each in wrong):
        facts = facts.model_copy(update={"is_still": True})
    return shown.make_finding(
        CheckName.OPTIMIZER_STEP,
        key,
        ranks,
        rank=rank,
        error=rate_error(abs(row.actual - row.expected) / scale),
        bound=row.allowed / scale,
        index=row.index,
        expected=row.expected,
        actual=row.actual,
        code=_choose_cause(facts),
        facts=facts,
        place=Place(ranks=ranks, stage=Stage.CLIP if facts.is_unclipped else Stage.OPTIMIZER_STEP),
    )


def _choose_cause(facts: RecomputedFacts) -> Cause:
    if facts.is_rounding_sure:
        return Cause.ROUNDING
    return Cause.NORM if facts.is_unclipped else Cause.OPTIMIZER


def _add_rate(facts: RecomputedFacts, row: RecomputedTensor, rates: Sequence[float]) -> RecomputedFacts:
    """Return the facts with the optimizer's learning rate, if it explains the error."""
    step, kind, _ = row.key
    if row.rate is None or kind != Kind.UPDATE or step >= len(rates) or _is_rate(row.rate, rates[step]):
        return facts
    terms = fit_rate(row, row.rate / rates[step]) if rates[step] else None
    if terms is None:
        return facts
    others = [other for other, rate in enumerate(rates) if _is_rate(row.rate, rate)]
    found = {
        "terms": terms,
        "rate": row.rate,
        "scheduled": rates[step],
        "rate_step": min(others, key=lambda other: abs(other - step), default=None),
    }
    return facts.model_copy(update=found)


def _is_rate(actual: float, wanted: float) -> bool:
    # Wide enough for a rate that the optimizer keeps as a tensor in float32.
    return math.isclose(actual, wanted, rel_tol=1e-6)


CHECKS = (OptimizerStep(),)
