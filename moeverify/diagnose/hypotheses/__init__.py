"""The hypotheses, one file each, in the order in which they are tried: from simple to complex.

What stands in one tier is tested together: on all wrong tensors, then on families, then on each alone, as far as a
hypothesis asks for that. What a tier explains no later one sees. To add a hypothesis, write its file with a
`HYPOTHESIS` in it and give its name a place in `moeverify.diagnose.order`; words for a new operation or observation
are in `moeverify.report.words`.
"""

from __future__ import annotations

from importlib import import_module

from moeverify.diagnose.hypotheses.base import Hypothesis
from moeverify.diagnose.order import ORDER

TIERS: tuple[tuple[Hypothesis, ...], ...] = tuple(
    tuple(import_module(f"{__name__}.{name}").HYPOTHESIS for name in tier) for tier in ORDER
)
