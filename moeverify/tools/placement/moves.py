"""Moves between two placements: the sender and receiver of each expert, and dropped replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.marks import BoolArray, mark
from moeverify.tools.placement.placement import Placement

MoveKind = Literal["move", "copy", "drop"]


@dataclass(frozen=True)
class Move:
    """One expert of one layer: sent and given up (`move`), sent and kept (`copy`), or only given up (`drop`).

    `source` holds the expert before, `target` after. For a `drop` both are the same rank.
    """

    layer: int
    expert: int
    kind: MoveKind
    source: int
    target: int


def list_moves(before: Placement, after: Placement, cluster: Cluster) -> tuple[Move, ...]:
    """Return the moves from one placement to the other, in the order of layers and experts.

    A rank gets an expert preferably from a rank that gives it up, else from one on its node, else from any.
    Ties go to the rank that has sent the least so far, then to the lowest rank. The result is the same on
    every rank.

    Raises: CaseError when the placements have different layers.
    """
    after = after.spell_out(after.layers or before.layers)
    before = before.spell_out(after.layers)
    sent = np.zeros(cluster.num_ranks, dtype=np.int64)
    moves: list[Move] = []
    for layer, old, new in zip(after.layers, mark(before), mark(after), strict=True):
        for expert in np.flatnonzero((old != new).any(1)):
            moves += _list_expert(layer, int(expert), old[expert], new[expert], cluster, sent)
    return tuple(moves)


def _list_expert(
    layer: int,
    expert: int,
    old: BoolArray,
    new: BoolArray,
    cluster: Cluster,
    sent: np.typing.NDArray[np.int64],
) -> Iterator[Move]:
    holders = np.flatnonzero(old).tolist()
    leaving = np.flatnonzero(old & ~new).tolist()
    for target in np.flatnonzero(new & ~old).tolist():

        def rate(source: int, target: int = target) -> tuple[bool, bool, int, int]:
            is_far = cluster.node_of(source) != cluster.node_of(target)
            return source not in leaving, is_far, int(sent[source]), source

        source = min(holders, key=rate)
        sent[source] += 1
        kind: MoveKind = "move" if source in leaving else "copy"
        if kind == "move":
            leaving.remove(source)
        yield Move(layer, expert, kind, source, target)
    for source in leaving:
        yield Move(layer, expert, "drop", source, source)
