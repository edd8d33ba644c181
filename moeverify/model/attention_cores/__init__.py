"""Implementations of attention on a rank, one module for each value of `layout.attention`.

Context parallelism replaces them by its own core (`moeverify.parallel.context_parallel`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.cases.choice import Implementation, Modules

if TYPE_CHECKING:
    from moeverify.model.attention import Core


class AttentionKind(Implementation):
    """An implementation of attention on a rank."""

    def make_core(self) -> Core:
        """Return the core; see `moeverify.model.attention.Core`."""
        raise NotImplementedError


ATTENTION: Modules[AttentionKind] = Modules("layout.attention", __name__)
