"""The parts of a gradient norm, and the norms that result from counting some of them wrong. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moeverify.results.script import NormFacts

_SAME = 1e-4  # relative; the ratios have the precision of the gradients
_APART = 1e-2  # explanations whose predictions are closer than this are indistinguishable


@dataclass(frozen=True)
class NormParts:
    """Sums of squares of gradients, counting each logical tensor once, and numbers of tensors.

    `replicated` covers tensors that every rank holds whole, and `sharded` the others. `local` is the part
    of `sharded` on one rank.
    """

    replicated: float
    sharded: float
    local: float
    num_replicated: int
    num_sharded: int

    @property
    def norm(self) -> float:
        """Return the norm of all gradients together."""
        return math.sqrt(self.replicated + self.sharded)

    def list_errors(self, num_ranks: int) -> Iterator[tuple[NormFacts, float]]:
        """Yield possible counting errors, with the resulting norm as a multiple of the right one."""
        total = self.replicated + self.sharded
        if not total or not self.sharded:
            return
        local = NormFacts(part="local", num_tensors=self.num_sharded)
        yield local, math.sqrt((self.replicated + self.local) / total)
        if not self.replicated:
            return  # all tensors are sharded: any wrong factor would fit
        ranks = float(num_ranks)
        for times in (ranks, 0.0, 1.0 / ranks):
            facts = NormFacts(part="replicated", times=times, num_tensors=self.num_replicated)
            yield facts, math.sqrt((self.sharded + times * self.replicated) / total)
        for times in (ranks, 0.0):
            facts = NormFacts(part="sharded", times=times, num_tensors=self.num_sharded)
            yield facts, math.sqrt((self.replicated + times * self.sharded) / total)


def choose_error(errors: Iterable[tuple[NormFacts, float]], ratio: float) -> NormFacts:
    """Return the single error whose norm is `ratio` times the right norm; `unknown` for none or several."""
    candidates = [
        facts.model_copy(update={"residual": abs(predicted / ratio - 1), "ratio": ratio})
        for facts, predicted in errors
        if abs(predicted - 1) > _SAME
    ]
    fitting = [each for each in candidates if each.residual < _SAME]
    rivals = [each for each in candidates if each.residual < _APART]
    if len(fitting) == 1 and len(rivals) == 1:
        return fitting[0]
    return NormFacts(part="unknown", ratio=ratio)


def find_shared_ratio(ratios: Iterable[float]) -> float | None:
    """Return the ratio that at least half of `ratios` share, or None.

    Gradients that are complete after the last backward pass are only scaled until the optimizer step.
    """
    ordered = sorted(ratios)
    best: Sequence[float] = []
    for start, ratio in enumerate(ordered):
        same = [each for each in ordered[start:] if each <= ratio * (1 + _SAME)]
        best = max(best, same, key=len)
    if 2 * len(best) < len(ordered) or not best:
        return None
    return best[len(best) // 2]
