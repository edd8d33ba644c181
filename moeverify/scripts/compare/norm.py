"""Hypotheses about a wrong gradient norm, tested against the recorded gradients."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.results.checks import Kind
from moeverify.results.script import NormFacts
from moeverify.scripts.compare.entries import Comparer
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
