"""The mesh axes of a layout, as far as they have to do with a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moeverify.diagnose.replicas import Groups


@dataclass(frozen=True)
class Axes:
    """`groups` are the groups of ranks of every axis, `degrees` the sizes that a factor may come from.

    `matters(axis, tensor)` says whether an axis has to do with a logical tensor at all.
    """

    groups: Groups
    degrees: Mapping[str, int]
    matters: Callable[[str, str], bool] = lambda axis, tensor: True

    def groups_of(self, name: str) -> Groups:
        """Return the groups of the axes that have to do with a tensor."""
        return {axis: groups for axis, groups in self.groups.items() if self.matters(axis, name)}

    def degrees_of(self, *names: str) -> dict[str, int]:
        """Return the degrees of the axes that have to do with any of these tensors."""
        return {
            axis: size
            for axis, size in self.degrees.items()
            if any(self.matters(axis, name) for name in names)
        }
