"""The parts of a gradient norm, and what it is when some of them are counted wrong. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moeverify.results.script import NormFacts

_SAME = 1e-4  # relative: ratios come from norms in the precision of the gradients
_APART = 1e-2  # two answers whose predictions are nearer than this cannot be told apart


@dataclass(frozen=True)
class NormParts:
    """Sums of squares of gradients, each logical tensor once, with the numbers of tensors.

    `replicated` is that of tensors which every rank has whole, `sharded` that of the others, and `local` the part of
    `sharded` that one rank has.
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
        """Yield what may be counted wrong, with the norm that this gives as a multiple of the right one."""
        total = self.replicated + self.sharded
        if not total or not self.sharded:
            return
        local = NormFacts(part="local", num_tensors=self.num_sharded)
        yield local, math.sqrt((self.replicated + self.local) / total)
        if not self.replicated:
            return  # the part is the whole, and any factor of it would fit
        ranks = float(num_ranks)
        for times in (ranks, 0.0, 1.0 / ranks):
            facts = NormFacts(part="replicated", times=times, num_tensors=self.num_replicated)
            yield facts, math.sqrt((self.sharded + times * self.replicated) / total)
        for times in (ranks, 0.0):
            facts = NormFacts(part="sharded", times=times, num_tensors=self.num_sharded)
            yield facts, math.sqrt((self.replicated + times * self.sharded) / total)


def choose_error(errors: Iterable[tuple[NormFacts, float]], ratio: float) -> NormFacts:
    """Return the one error whose norm is `ratio` times the right one; `unknown` where none or several are."""
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
    """Return the ratio that at least half of all share, None where there is none.

    A gradient that is complete when the last backward pass ends is only scaled until the optimizer step.
    """
    ordered = sorted(ratios)
    best: Sequence[float] = []
    for start, ratio in enumerate(ordered):
        same = [each for each in ordered[start:] if each <= ratio * (1 + _SAME)]
        best = max(best, same, key=len)
    if 2 * len(best) < len(ordered) or not best:
        return None
    return best[len(best) // 2]
