"""The rule that a pass needs evidence: the tensors of a case that its checks decide. Without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection

from moeverify.results.checks import CheckName
from moeverify.results.record import Record

DECIDED_LIMIT = 0.2
"""A tensor is decided if a relative error of this size would have failed."""

DECIDED_SHARE = 0.95
"""A pass requires this share of decided tensors, of each kind."""

DECIDED_KINDS = (CheckName.LOSS, CheckName.GRADIENT, CheckName.UPDATE)
"""The checks whose tensors must be decided."""

VANISHING = 1e-7
"""A gradient whose norm is below this share of the norm of all gradients of its step is taken for zero."""


class Decided(Record):
    """The number of decided tensors of a check, out of `tensors`.

    `limit` is the median detection limit of the undecided tensors, and `worst` the largest one. Both are 0 if
    all tensors are decided.

    A gradient that is zero up to rounding has no relative error; an example is the bias of a key projection
    without RoPE. If it is undecided, neither it nor its update counts.
    """

    tensors: int
    decided: int
    limit: float = 0.0
    worst: float = 0.0

    @property
    def is_enough(self) -> bool:
        """Return whether the share of decided tensors permits a pass."""
        return self.decided >= DECIDED_SHARE * self.tensors


def count_decided(limits: Collection[float]) -> Decided:
    """Return how many tensors with these detection limits are decided."""
    others = [limit for limit in limits if math.isnan(limit) or limit > DECIDED_LIMIT]
    return Decided(
        tensors=len(limits),
        decided=len(limits) - len(others),
        limit=statistics.median(others) if others else 0.0,
        worst=max(others, default=0.0),
    )
