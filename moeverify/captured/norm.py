"""What a wrong gradient norm counts, tested against the gradients that are there."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moeverify.captured.entries import Comparer
from moeverify.results.checks import Kind
from moeverify.results.script import NormFacts

_SAME = 1e-4  # relative: the ratio comes from norms in the precision of the gradients
_APART = 1e-2  # two answers whose predictions are nearer than this cannot be told apart


def explain_norm(comparer: Comparer, step: int, rank: int) -> NormFacts:
    """Return which of several wrong sums of squares gives the clip coefficient of a rank; `unknown` where none does.

    The norms are known up to a factor, the same for all: a coefficient is max_norm / norm, so the ratio of the
    coefficients of two runs that both clip is the inverse ratio of their norms.
    """
    wanted = comparer.coefficient(comparer.expected.ranks[0], step)
    found = comparer.coefficient(comparer.actual.ranks[rank], step)
    ratio = found.norm / wanted.norm if found.norm and wanted.norm else wanted.value / found.value
    candidates = [
        facts.model_copy(update={"residual": abs(predicted / ratio - 1), "ratio": ratio})
        for facts, predicted in _list_candidates(comparer, step, rank)
        if abs(predicted - 1) > _SAME
    ]
    fitting = [each for each in candidates if each.residual < _SAME]
    rivals = [each for each in candidates if each.residual < _APART]
    if len(fitting) == 1 and len(rivals) == 1:
        return fitting[0]
    return NormFacts(part="unknown", ratio=ratio)


def _list_candidates(comparer: Comparer, step: int, rank: int) -> Iterator[tuple[NormFacts, float]]:
    """Yield what may be counted wrong, with the norm that this gives as a multiple of the right one."""
    num_ranks = comparer.actual.world_size
    replicated = comparer.places.replicated(num_ranks)
    squares: dict[str, float] = {}
    local = 0.0
    for name in dict.fromkeys(each.name for each in comparer.places.known.values()):
        whole = comparer.read_expected(step, Kind.GRADIENT, name)
        if whole is None:
            return  # without all gradients no sum of their squares is known
        squares[name] = float(whole.double().square().sum())
        local += sum(
            float(placed.region.take(whole).double().square().sum())
            for (number, _), placed in comparer.places.known.items()
            if number == rank and placed.name == name and name not in replicated
        )
    dense = sum(value for name, value in squares.items() if name in replicated)
    sharded = sum(squares.values()) - dense
    total = dense + sharded
    if not total or not sharded:
        return
    num_dense, num_sharded = len(replicated & squares.keys()), len(squares.keys() - replicated)
    yield NormFacts(part="local", num_tensors=num_sharded), math.sqrt((dense + local) / total)
    if not dense:
        return  # the part is the whole, and any factor of it would fit
    for part, times, other, counted, number in (
        ("replicated", float(num_ranks), sharded, dense, num_dense),
        ("replicated", 0.0, sharded, dense, num_dense),
        ("replicated", 1.0 / num_ranks, sharded, dense, num_dense),
        ("sharded", float(num_ranks), dense, sharded, num_sharded),
        ("sharded", 0.0, dense, sharded, num_sharded),
    ):
        facts = NormFacts.model_validate({"part": part, "times": times, "num_tensors": number})
        yield facts, math.sqrt((other + times * counted) / total)
