"""Causes of the first numeric difference between two runs, by the diagnosis hypotheses that need no rerun."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.diagnosis import make_origins
from moeverify.explain.fitting.engine import DiagnosedCause, explain_tensors
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import Key, RankShard, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.factor import Source
from moeverify.results.finding import Finding
from moeverify.results.observation import AmbiguousCount, HiddenByRounding, OtherPasses
from moeverify.results.operation import Scaled
from moeverify.results.script import NormFacts
from moeverify.scripts.compare.batch import find_other_passes
from moeverify.scripts.compare.calls import calls_of
from moeverify.scripts.compare.entries import Comparer
from moeverify.scripts.compare.losses import find_losses
from moeverify.scripts.record.norm_parts import NormParts, choose_error


def explain_norm(comparer: Comparer, step: int, rank: int) -> NormFacts:
    """Return the wrong sum of squares that gives the clip coefficient of a rank; `unknown` if none fits.

    The norms are known up to a common factor. A coefficient is max_norm / norm, so the ratio of the
    coefficients of two runs that both clip is the inverse ratio of their norms.
    """
    wanted = comparer.coefficient(comparer.expected.ranks[0], step)
    found = comparer.coefficient(comparer.actual.ranks[rank], step)
    ratio = found.norm / wanted.norm if found.norm and wanted.norm else wanted.value / found.value
    return choose_error(_list_candidates(comparer, step, rank), ratio)


def _list_candidates(comparer: Comparer, step: int, rank: int) -> Iterator[tuple[NormFacts, float]]:
    """Yield possible counting errors, with the resulting norm as a multiple of the right one."""
    num_ranks = comparer.actual.world_size
    replicated = comparer.places.replicated(num_ranks)
    squares: dict[str, float] = {}
    local = 0.0
    for name in dict.fromkeys(each.name for each in comparer.places.known.values()):
        whole = comparer.read_expected(step, Kind.GRADIENT, name)
        if whole is None:
            return  # the sums of squares need all gradients
        squares[name] = float(whole.double().square().sum())
        local += sum(
            float(placed.region.take(whole).double().square().sum())
            for (number, _), placed in comparer.places.known.items()
            if number == rank and placed.name == name and name not in replicated
        )
    dense = sum(value for name, value in squares.items() if name in replicated)
    parts = NormParts(
        replicated=dense,
        sharded=sum(squares.values()) - dense,
        local=local,
        num_replicated=len(replicated & squares.keys()),
        num_sharded=len(squares.keys() - replicated),
    )
    yield from parts.list_errors(num_ranks)


RANKS, MICRO_BATCHES = "ranks", "micro-batches"
_NEAR, _FAR = 0.1, 0.3  # of logarithms of ratios: weights differ after the first wrong step


def list_sources(comparer: Comparer, step: int) -> list[Source]:
    """Return the numbers of ranks and of micro-batches of a step, without one that the run rules out.

    No gradient is averaged over ranks if each tensor is on one of them, as in a pipeline. If a step has
    another number of micro-batches, its gradients show which of two equal numbers the factor is.
    """
    run = comparer.actual
    ranks = Source(name=RANKS, size=run.world_size)
    batches = Source(name=MICRO_BATCHES, size=_count_micro_batches(comparer, step))
    holders = Counter(placed.name for placed in comparer.places.known.values())
    if run.world_size > 1 and set(holders.values()) == {1} and not comparer.places.unknown:
        return [batches]
    if ranks.size == batches.size > 1:
        for other in run.steps:
            number = _count_micro_batches(comparer, other)
            if number != batches.size and other in comparer.expected.steps:
                ratio = _measure_ratio(comparer, other)
                near = [each for each in (ranks.size, number) if abs(math.log(ratio / each)) < _NEAR]
                far = [each for each in (ranks.size, number) if abs(math.log(ratio / each)) > _FAR]
                if len(near) == len(far) == 1:
                    return [ranks] if near[0] == ranks.size else [batches]
    return [ranks, batches]


def note_ambiguous(finding: Finding, comparer: Comparer, step: int) -> Finding:
    """Return a finding with the way to separate equal numbers of ranks and micro-batches, if it needs one."""
    operation = None if finding.explanation is None else finding.explanation.operation
    parts = operation.contributions if isinstance(operation, Scaled) else ()
    if not any({RANKS, MICRO_BATCHES} <= set(part.factor.sources) for part in parts):
        return finding
    header = comparer.actual.ranks[0].header
    seen = AmbiguousCount(
        num_ranks=comparer.actual.world_size,
        num_micro_batches=_count_micro_batches(comparer, step),
        script=header.script,
    )
    return finding.model_copy(update={"observations": (*finding.observations, seen)})


def _count_micro_batches(comparer: Comparer, step: int) -> int:
    return sum(call.name == "backward" for call in calls_of(comparer.actual.ranks[0], step)) or 1


def _measure_ratio(comparer: Comparer, step: int) -> float:
    """Return the median ratio of the norms of this run's gradients and the expected ones; 1 if unknown."""
    ratios = []
    for rank in comparer.actual.ranks:
        for (number, own), placed in comparer.places.known.items():
            line = rank.values.get((step, Kind.GRADIENT, own)) if number == rank.rank else None
            whole = None if line is None else comparer.read_expected(step, Kind.GRADIENT, placed.name)
            local = None if line is None else comparer.read_actual(rank, line)
            if whole is None or local is None:
                continue
            expected, actual = float(placed.region.take(whole).norm()), float(local.norm())
            if expected > 0.0 and actual > 0.0:
                ratios.append(actual / expected)
    return median(ratios) if ratios else 1.0


# The other causes need data that a recording lacks: parts of a gradient, a second run, dtypes of a recipe.
_KNOWN = (
    Cause.SCALE,
    Cause.DETACHED,
    Cause.MISSING_REDUCTION,
    Cause.PERMUTATION,
    Cause.DUPLICATE,
    Cause.STALE,
)


def explain_gradients(
    comparer: Comparer, findings: Sequence[Finding], step: int, *, is_mixed: bool
) -> list[Finding]:
    """Return the findings of gradients at a step with their causes, one origin per cause first.

    With `is_mixed`, some computation runs in 16 bits: all gradients then have its rounding, whatever their
    dtype.
    """
    tensors: dict[Key, WrongTensor] = {}
    for finding in findings:
        tensor = _make_tensor(comparer, (step, Kind.GRADIENT, finding.tensor), is_mixed=is_mixed)
        if tensor is not None:
            tensors[tensor.key] = tensor
    if not tensors:
        return list(findings)
    inputs = DiagnosisInputs(tensors=tensors, axes=_make_axes(comparer, step))
    causes = [_keep_known(cause) for cause in explain_tensors(list(tensors.values()), inputs)]
    unexplained = tuple(each for cause in causes if cause.explanation is None for each in cause.tensors)
    causes = [cause for cause in causes if cause.explanation is not None]
    if unexplained:
        # The first in the order of the optimizer's parameters, which is nearly always the order of the
        # forward pass.
        causes.append(DiagnosedCause(unexplained, None, unexplained[0]))
    origins, explained = make_origins(causes, findings, inputs)
    origins = [_add_passes(_drop_advice(origin), comparer, step) for origin in origins]
    origins = [each if is_mixed else add_losses(each, comparer, step) for each in origins]
    origins = [note_ambiguous(origin, comparer, step) for origin in origins]
    rest = [finding for finding in findings if (finding.check, finding.tensor, finding.step) not in explained]
    return origins + [finding.model_copy(update={"follows": origins[0].tensor}) for finding in rest]


def _drop_advice(finding: Finding) -> Finding:
    """Remove the advice to run the recipe in float64: a script has no recipe."""
    left = tuple(seen for seen in finding.observations if not isinstance(seen, HiddenByRounding))
    return finding.model_copy(update={"observations": left})


def _add_passes(finding: Finding, comparer: Comparer, step: int) -> Finding:
    """Add the difference between the runs' forward passes to an unexplained finding, if they differ."""
    passes = find_other_passes(comparer.expected, comparer.actual, step) if finding.unexplained else None
    if passes is None:
        return finding
    return finding.model_copy(update={"observations": (passes, *finding.observations)})


def add_losses(finding: Finding, comparer: Comparer, step: int) -> Finding:
    """Add the losses of both runs to an unexplained finding of the first step, if these are known."""
    is_first = step == comparer.expected.steps[0] == comparer.actual.steps[0]
    seen = find_losses(comparer.expected, comparer.actual, step) if finding.unexplained and is_first else None
    if seen is None or any(isinstance(each, OtherPasses) for each in finding.observations):
        return finding
    return finding.model_copy(update={"observations": (seen, *finding.observations)})


def _keep_known(cause: DiagnosedCause) -> DiagnosedCause:
    is_known = cause.explanation is None or cause.explanation.cause in _KNOWN
    return cause if is_known else DiagnosedCause(cause.tensors, None, cause.subject)


def _make_tensor(comparer: Comparer, key: Key, *, is_mixed: bool) -> WrongTensor | None:
    step, kind, name = key
    whole = comparer.read_expected(*key)
    if whole is None:
        return None
    shards: list[RankShard] = []
    dtype = torch.float64
    for rank in comparer.actual.ranks:
        for (number, own), placed in comparer.places.known.items():
            line = rank.values.get((step, kind, own)) if number == rank.rank else None
            if line is None or placed.name != name:
                continue
            local = comparer.read_actual(rank, line)
            if local is None and not line.is_absent:
                return None
            if line.dtype:
                dtype = getattr(torch, line.dtype)
            shards.append(RankShard(rank.rank, placed.region, local))
    precision = torch.bfloat16 if is_mixed and dtype.itemsize > 2 else dtype
    return WrongTensor(key, whole.to(torch.float64), tuple(shards), precision)


def _make_axes(comparer: Comparer, step: int) -> Axes:
    """Return one axis with all ranks, and the integers that may be the factor of a wrong divisor."""
    return Axes({RANKS: [list(range(comparer.actual.world_size))]}, list_sources(comparer, step))
