"""The hypotheses, one file each, tried in order from simple to complex.

The engine tests each tier on all wrong tensors, then on families, then on single tensors, within the scopes
of each hypothesis. Later tiers do not see tensors that an earlier tier explains.

To add a hypothesis, write a file that defines `HYPOTHESIS` and add its name to `moeverify.explain.fitting.order`.
Wording for a new operation or observation goes into `moeverify.report.words`.
"""

from __future__ import annotations

from importlib import import_module

from moeverify.explain.fitting.hypotheses.base import Hypothesis
from moeverify.explain.fitting.order import ORDER

TIERS: tuple[tuple[Hypothesis, ...], ...] = tuple(
    tuple(import_module(f"{__name__}.{name}").HYPOTHESIS for name in tier) for tier in ORDER
)
