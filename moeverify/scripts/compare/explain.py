"""Causes of the first numeric difference between two runs, by the diagnosis hypotheses that need no rerun."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.diagnosis import make_origins
from moeverify.explain.fitting.engine import DiagnosedCause, explain_tensors
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import Key, RankShard, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.observation import HiddenByRounding
from moeverify.scripts.compare.batch import find_other_passes
from moeverify.scripts.compare.counts import RANKS, list_sources, note_ambiguous
from moeverify.scripts.compare.entries import Comparer

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
