"""Process groups of the ranks that hold the same experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moeverify.cases.axes.mesh import View
from moeverify.errors import MachineError
from moeverify.seams import seam
from moeverify.tools.placement.buckets import list_buckets
from moeverify.tools.placement.placement import Placement

Holders = tuple[int, ...]
"""Coordinates on ep, ascending."""


@dataclass(frozen=True)
class HolderGroup:
    """The ranks that hold the same experts, including this rank; `group` is None for a single rank."""

    ranks: tuple[int, ...]
    group: ProcessGroup | None


class HolderGroups:
    """The holder groups of one layout, created once per set of holders.

    A group contains the ranks at the holders' coordinates on ep, in all copies of the ep group that train
    the same layers.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._made: dict[Holders, HolderGroup | None] = {}

    @seam
    def make(self, placement: Placement) -> None:
        """Create the groups that a placement needs and that do not exist yet. Collective: all ranks.

        Every rank creates every group in the same order, including groups that it is not in. torch derives
        a group's name from the number of groups that a rank knows. If ranks created only their own groups,
        these numbers would differ and the ranks would deadlock.

        Raises: MachineError when the backend cannot create a group; existing groups are kept.
        """
        made: dict[Holders, HolderGroup | None] = {}
        missing = [
            (holders, ranks)
            for holders in sorted(list_holders(placement) - set(self._made))
            for ranks in list_holder_ranks(self._view, holders)
        ]
        for number, (holders, ranks) in enumerate(missing):
            try:
                group = _make_group(ranks)
            except RuntimeError as error:
                raise MachineError(
                    f"the backend {dist.get_backend()} cannot make the group of ranks {', '.join(map(str, ranks))}, "
                    f"{number + 1} of {len(missing)} that the placement needs: {error}; no expert was moved; use a "
                    "placement with fewer different sets of ranks that hold an expert"
                ) from error
            found = HolderGroup(tuple(ranks), group) if dist.get_rank() in ranks else None
            made[holders] = found or made.get(holders)
        self._made |= made

    @seam
    def keep_only(self, placement: Placement) -> None:
        """Destroy the groups that a placement does not need.

        Collective: all ranks, with no other collective in progress.
        """
        needed = list_holders(placement)
        unused = [holders for holders in sorted(self._made) if holders not in needed]
        if unused:
            dist.barrier()  # no rank may still use a group that another rank destroys
        for holders in unused:
            found = self._made.pop(holders)
            if found is not None and found.group not in (None, dist.group.WORLD):
                dist.destroy_process_group(found.group)

    def list_own(self) -> list[Holders]:
        """Return the sets of holders that include this rank, in creation order of their groups."""
        return [holders for holders, found in self._made.items() if found is not None]

    @seam
    def find(self, holders: Holders) -> HolderGroup:
        """Return the group of a set of holders that includes this rank."""
        found = self._made[holders]
        assert found is not None, f"this rank is none of the holders {holders}"
        return found


def list_holders(placement: Placement) -> set[Holders]:
    """Return all sets of holders of a placement, plus the set of all ranks (for the gradient norm)."""
    found = {bucket.holders for matrix in placement.matrices for bucket in list_buckets(matrix)}
    return found | {tuple(range(placement.num_ranks))}


def list_holder_ranks(view: View, holders: Iterable[int]) -> list[list[int]]:
    """Return one list of ranks per pipeline stage: those at the holders' coordinates on ep.

    Each list covers all copies of the ep group that have the layers of the stage.
    """
    wanted = frozenset(holders)
    copies = [axis for axis in view.axes if axis != "pp"]
    return [
        [rank for rank in group if view.coordinates(rank)["ep"] in wanted] for group in view.groups(*copies)
    ]


def _make_group(ranks: Sequence[int]) -> ProcessGroup | None:
    """Return a group of ranks, or None for a single rank. Collective: all ranks of the default group."""
    if len(ranks) == 1:
        return None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    group = dist.new_group(list(ranks), group_desc="holders of experts")
    return group if isinstance(group, ProcessGroup) else None
