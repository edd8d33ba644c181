"""Comparison of every logical tensor that the training loop shows with the golden."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moeverify.parallel.regions.sketch import NUM_PROJECTIONS, OVER, find_confidence
from moeverify.results.checks import CheckName, Kind
from moeverify.results.comparable import comparable
from moeverify.results.decided import VANISHING
from moeverify.results.facts import BySketch, ComparedFacts
from moeverify.results.finding import MAX_CONCLUSIVE, CheckResult, Finding, Worst
from moeverify.results.initial_values import InitialSource
from moeverify.train.initial_weights import find_source
from moeverify.verification.checks.base import Check, CheckOutcome, ComparedTensors, ShownTensors
from moeverify.verification.checks.bounds import Bounds, Criterion, Metric, Norms, Parts
from moeverify.verification.compare.assembled import Assembled, Key

Unit = tuple[int, str, str]  # step, kind, moment of the optimizer


class GoldenTensors(Check[Any]):
    """Comparison of some kinds of logical tensors with the golden, each within its own bound."""

    def __init__(
        self, name: CheckName, kinds: tuple[str, ...], *, exact: bool = False, metric: Metric = "relative"
    ) -> None:
        self.name = name
        self.kinds = kinds
        self.criterion = Criterion(exact, metric)

    def judge(self, shown: ShownTensors, reports: Sequence[Any]) -> CheckOutcome | None:
        """Return whether every tensor is within its bound; see `Check`."""
        return self.compare(shown)

    def compare(self, shown: ComparedTensors) -> CheckOutcome | None:
        """Return whether every tensor is within its bound, for any source of the expected tensors."""
        tensors = shown.of_kinds(self.kinds)
        if not tensors:
            return None
        norms = _measure_norms(tensors)
        measured = [
            (tensor, *self._measure(tensor, shown.bounds, norms[find_unit(tensor.key)])) for tensor in tensors
        ]
        findings = tuple(
            _make_finding(shown, self.name, tensor, error, bound)
            for tensor, error, bound in measured
            if not error <= bound * _find_slack(tensor)  # also true if the error is NaN
        )
        tensor, error, bound = max(measured, key=lambda entry: comparable(_share(*entry[1:])))
        step, _, name = tensor.key
        is_relative = self.criterion.metric == "relative"
        result = CheckResult(
            name=self.name,
            verdict="mismatch" if findings else "pass",
            tensors=len(tensors),
            worst=Worst(tensor=name, error=error, bound=bound, step=step),
            inconclusive=sum(is_relative and bound > MAX_CONCLUSIVE for _, _, bound in measured),
            facts=_describe_sketches(measured),
        )
        limits = {each[0].key: _find_limit(*each) for each in measured} if is_relative else {}
        parts = {
            tensor.key: self._list_parts(tensor, shown.bounds, norms[find_unit(tensor.key)])
            for tensor in tensors
            if is_relative
        }
        errors = {tensor.key: error for tensor, error, _ in measured} if is_relative else {}
        return CheckOutcome(result, findings, limits, _find_vanishing(tensors, norms), parts, errors)

    def _list_parts(self, tensor: Assembled, bounds: Bounds, kind_norm: float) -> Parts:
        norm = math.sqrt(tensor.difference.sum_expected2)
        return bounds.list_parts(tensor.key, self.criterion, Norms(norm, kind_norm))

    def _measure(self, tensor: Assembled, bounds: Bounds, kind_norm: float) -> tuple[float, float]:
        """Return (error, bound) in the unit of the criterion's metric."""
        difference = tensor.difference
        norm = math.sqrt(difference.sum_expected2)
        if norm == 0.0 and kind_norm > 0.0 and self._is_off_zero(tensor):
            # An error relative to an all-zero golden is undefined. The norm of the whole kind is the unit.
            return math.sqrt(difference.sum_error2) / kind_norm, bounds.zero_bound()
        bound = bounds.bound(tensor.key, self.criterion, Norms(norm, kind_norm))
        if difference.num_nonfinite:
            return math.inf, bound
        if self.criterion.metric == "largest":
            return difference.max_error, bound
        return difference.relative_error, bound

    def _is_off_zero(self, tensor: Assembled) -> bool:
        difference = tensor.difference
        is_measured = self.criterion.metric == "relative" and not self.criterion.exact
        return is_measured and not difference.num_nonfinite and difference.sum_error2 > 0.0


def _measure_norms(tensors: Sequence[Assembled]) -> Mapping[Unit, float]:
    """Return the golden's norm over all tensors of each unit."""
    squares: dict[Unit, float] = {}
    for tensor in tensors:
        unit = find_unit(tensor.key)
        squares[unit] = squares.get(unit, 0.0) + tensor.difference.sum_expected2
    return {unit: math.sqrt(total) for unit, total in squares.items()}


def _find_vanishing(tensors: Sequence[Assembled], norms: Mapping[Unit, float]) -> frozenset[str]:
    """Return the names of the gradients whose golden is zero but for rounding, in any step."""
    return frozenset(
        tensor.key[2]
        for tensor in tensors
        if tensor.key[1] == Kind.GRADIENT
        and math.sqrt(tensor.difference.sum_expected2) <= VANISHING * norms[find_unit(tensor.key)]
    )


def find_unit(key: Key) -> Unit:
    """Return the group of tensors whose norm is the unit of a tensor's error.

    A step counter, a first and a second moment of the optimizer differ by ten orders of magnitude. Measured
    together with the counters, all second moments would be below rounding.
    """
    step, kind, name = key
    return step, kind, name.rpartition(".")[2] if kind == Kind.OPTIMIZER_STATE else ""


def _share(error: float, bound: float) -> float:
    """Return the error as a fraction of its bound."""
    if bound > 0.0:
        return error / bound
    return math.inf if error > 0.0 else 0.0


def _find_slack(tensor: Assembled) -> float:
    """Return the factor by which an error may exceed its bound because it was estimated."""
    return OVER if tensor.is_estimated else 1.0


def _find_limit(tensor: Assembled, error: float, bound: float) -> float:
    """Return the relative error above which a tensor fails: infinity if an estimate decides nothing."""
    if not tensor.is_estimated:
        return bound
    shape = tensor.shards[0][1].shape
    # An estimate between the bound and `OVER` times the bound decides neither way.
    return math.inf if bound < error <= bound * OVER else bound * find_confidence(shape)


def _describe_sketches(measured: Sequence[tuple[Assembled, float, float]]) -> BySketch | None:
    """Return the number of tensors that were judged by sketches; None if there are none."""
    estimated = [each for each in measured if each[0].is_estimated]
    if not estimated:
        return None
    num_open = sum(math.isinf(_find_limit(*each)) for each in estimated)
    return BySketch(num_projections=NUM_PROJECTIONS, num_tensors=len(estimated), num_open=num_open)


def _make_finding(
    shown: ComparedTensors, check: CheckName, tensor: Assembled, error: float, bound: float
) -> Finding:
    rank, entry = tensor.worst_shard()
    difference = tensor.difference
    absent = tuple(rank for rank, shard in tensor.shards if shard.state == "absent")
    is_unexpected = any(shard.state == "unexpected" for _, shard in tensor.shards)
    facts = ComparedFacts(
        absent_ranks=absent,
        is_unexpected=is_unexpected,
        num_nonfinite=int(difference.num_nonfinite),
        source=_find_source(shown) if check == CheckName.INITIAL_STATE else None,
        block=tuple((along.start, along.stop) for along in entry.block),
    )
    return shown.make_finding(
        check,
        tensor.key,
        tensor.differing_ranks(),
        rank=rank,
        error=error,
        bound=bound,
        scale=difference.scale,
        cosine=difference.cosine,
        index=entry.index,
        expected=None if entry.is_estimated else entry.difference.expected_at,
        actual=None if entry.is_estimated else entry.difference.actual_at,
        facts=facts if facts != ComparedFacts() else None,
    )


def _find_source(shown: ComparedTensors) -> InitialSource | None:
    """Return the source of the initial values; None for a recorded script, where it is unknown."""
    return find_source(shown.case.recipe) if isinstance(shown, ShownTensors) else None


CHECKS = (
    GoldenTensors(CheckName.INITIAL_STATE, (Kind.INITIAL_WEIGHT, Kind.INITIAL_BUFFER), exact=True),
    GoldenTensors(CheckName.ROUTING, (Kind.ROUTER_IDS, Kind.ROUTER_COUNTS), exact=True),
    GoldenTensors(CheckName.ROUTING_FLIPS, (Kind.ROUTER_FLIPS,), metric="largest"),
    GoldenTensors(CheckName.ROUTING_WEIGHTS, (Kind.ROUTER_WEIGHTS,)),
    GoldenTensors(CheckName.LOSS, (Kind.TOKEN_LOSS, Kind.LOSS)),
    GoldenTensors(CheckName.GRADIENT, (Kind.GRADIENT,)),
    GoldenTensors(CheckName.GRADIENT_NORM, (Kind.GRADIENT_NORM,)),
    GoldenTensors(CheckName.UPDATE, (Kind.UPDATE,)),
    GoldenTensors(CheckName.OPTIMIZER_STATE, (Kind.OPTIMIZER_STATE,)),
    GoldenTensors(CheckName.BUFFERS, (Kind.BUFFER,)),
)
