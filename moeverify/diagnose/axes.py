"""The mesh axes of a layout, as far as they have to do with a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moeverify.results.factor import Source

Groups = Mapping[str, Sequence[Sequence[int]]]  # axis -> its groups of ranks


@dataclass(frozen=True)
class Axes:
    """`groups` are the groups of ranks of every axis, `sources` the integers that a factor may come from.

    `affects(axis, tensor)` says whether an axis has to do with a logical tensor at all. `loss_counts` are integers of
    the recipe that the terms of a loss are divided by: rows, experts, layers; `module_counts` those of what modules
    are made of: heads, experts, choices.
    """

    groups: Groups
    sources: Sequence[Source] = ()
    affects: Callable[[str, str], bool] = lambda axis, tensor: True
    loss_counts: Sequence[Source] = ()
    module_counts: Sequence[Source] = ()

    def groups_of(self, name: str) -> Groups:
        """Return the groups of the axes that have to do with a tensor."""
        return {axis: groups for axis, groups in self.groups.items() if self.affects(axis, name)}

    def counts_of(self, module: str) -> list[Source]:
        """Return the counts that have to do with a module."""
        return [source for source in self.module_counts if self.affects(source.name, module)]

    def sources_of(self, *names: str) -> list[Source]:
        """Return the sources that have to do with any of these tensors."""
        return [source for source in self.sources if any(self.affects(source.name, name) for name in names)]
