"""How a rank attends: each core is a file here, called as `layout.attention` calls it.

Context parallelism replaces it by a core of its own (`moeverify.parallel.context_parallel`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.case.choice import Implementation, Modules

if TYPE_CHECKING:
    from moeverify.model.attention import Core


class AttentionKind(Implementation):
    """One implementation of attention on a rank."""

    def make_core(self) -> Core:
        """Return the core: see `moeverify.model.attention.Core`."""
        raise NotImplementedError


ATTENTION: Modules[AttentionKind] = Modules("layout.attention", __name__)
