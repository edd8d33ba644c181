"""Mesh axes of a layout, and the tensors that they affect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moeverify.results.factor import Source

Groups = Mapping[str, Sequence[Sequence[int]]]  # axis -> its groups of ranks


@dataclass(frozen=True)
class Axes:
    """Mesh axes of a layout.

    `groups` has the rank groups of each axis, and `sources` the integers that may explain a factor.
    `affects(axis, tensor)` returns whether an axis affects a logical tensor. `loss_counts` are integers of
    the recipe by which loss terms are divided: rows, experts, layers. `module_counts` are integers of
    modules: heads, experts, choices.
    """

    groups: Groups
    sources: Sequence[Source] = ()
    affects: Callable[[str, str], bool] = lambda axis, tensor: True
    loss_counts: Sequence[Source] = ()
    module_counts: Sequence[Source] = ()

    def groups_of(self, name: str) -> Groups:
        """Return the groups of the axes that affect a tensor."""
        return {axis: groups for axis, groups in self.groups.items() if self.affects(axis, name)}

    def counts_of(self, module: str) -> list[Source]:
        """Return the counts that affect a module."""
        return [source for source in self.module_counts if self.affects(source.name, module)]

    def sources_of(self, *names: str) -> list[Source]:
        """Return the sources that affect any of these tensors."""
        return [source for source in self.sources if any(self.affects(source.name, name) for name in names)]
