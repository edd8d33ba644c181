"""The graphs of all ranks and micro-batches as one, whose values are compared with those of one device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property, reduce
from operator import add

from moeverify.diagnose.graph.record import Graph, Moments, Node

Joint = tuple[int, ...]
"""The nodes of one tensor, of every rank and micro-batch that has it."""

_MOVES = (
    *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"),
    *(
        "allreduce_",
        "allgather_",
        "_allgather_base_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "alltoall_base_",
    ),
    *("alltoall_", "broadcast_", "send", "recv_", "allgather_into_tensor_coalesced_"),
)
"""What moves values between ranks: one device has nothing of the kind."""


_PLACES = frozenset({"sort", "topk", "max", "min", "mode", "kthvalue"})
"""Operators whose second result are places in what they took."""


class OneDevice:
    """The graph of one device."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = {self.strip(number): end for end, number in reversed(graph.ends.items())}

    def node(self, number: int) -> Node:
        """Return a node by its number."""
        return self.graph.nodes[number]

    def strip(self, number: int) -> int:
        """Return the node that first had the elements of this one."""
        while (node := self.graph.nodes[number]).is_same:
            number = node.args[0]
        return number

    @cached_property
    def by_size(self) -> list[tuple[float, int]]:
        """Return the mean size of the elements of every node, in order."""
        kept = ((each.moments, number) for number, each in enumerate(self.graph.nodes) if not each.is_same)
        return sorted((moments.first_size / moments.count, number) for moments, number in kept)


class Ranks:
    """The graphs of several ranks, each once for every micro-batch."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self.graphs = graphs
        self._moments: dict[Joint, Moments] = {}

    def strip(self, joint: Joint, *, passes_moves: bool = False) -> Joint:
        """Return the nodes that first had these elements on their ranks, or, before collectives, on others."""
        while True:
            nodes = self.nodes(joint)
            moves = passes_moves and all(each.operator in _MOVES and len(each.args) == 1 for each in nodes)
            if not (moves or all(each.is_same for each in nodes)):
                return joint
            joint = tuple(each.args[0] for each in nodes)

    def nodes(self, joint: Joint) -> list[Node]:
        """Return the node of each rank and micro-batch."""
        return [graph.nodes[number] for graph, number in zip(self.graphs, joint, strict=True)]

    def same(self, joint: Joint) -> Node | None:
        """Return the node of the first, where all are made by the same operator of as many arguments."""
        nodes = self.nodes(joint)
        kinds = {(each.operator, each.output, len(each.args)) for each in nodes}
        return nodes[0] if len(kinds) == 1 else None

    def args(self, joint: Joint) -> list[Joint]:
        """Return what the operator of a joint has taken, argument by argument."""
        return list(zip(*(each.args for each in self.nodes(joint)), strict=True))

    def moments(self, joint: Joint) -> Moments:
        """Return the moments of what all have together."""
        if joint not in self._moments:
            self._moments[joint] = reduce(add, (each.moments for each in self.nodes(joint)))
        return self._moments[joint]


class Values:
    """Says which tensors of ranks are those of one device: up to `bound`, or `scale` times these."""

    def __init__(self, one: OneDevice, ranks: Ranks, bound: float) -> None:
        self.one, self.ranks, self.bound = one, ranks, bound
        self.scales = sorted({1.0, *(graph.scale for graph in ranks.graphs)})
        self._found: dict[Joint, int | None] = {}

    def match(self, joint: Joint, number: int) -> bool:
        """Return whether ranks have together the elements of a node of one device, in any order."""
        node, other = self.one.node(number), self.ranks.same(joint)
        right, found = node.moments, self.ranks.moments(joint)
        if other is not None and _is_of_places(other):
            is_same = node.operator == other.operator and node.output == other.output
            return is_same and self.match(self.ranks.args(joint)[0], node.args[0])
        return any(is_alike(found, right, scale, self.bound) for scale in self.scales)

    def find(self, joint: Joint) -> int | None:
        """Return the first node of one device that has the elements which ranks have together."""
        if joint not in self._found:
            self._found[joint] = self._find(joint)
        return self._found[joint]

    def _find(self, joint: Joint) -> int | None:
        found, node = self.ranks.moments(joint), self.ranks.same(joint)
        if node is not None and _is_of_places(node):
            return None
        known = self.one.by_size
        matching = []
        for scale in self.scales:
            size = found.first_size / found.count / scale
            width = self.bound * size
            at = bisect_left(known, (size - width, -1))
            while at < len(known) and known[at][0] <= size + width:
                if is_alike(found, self.one.node(known[at][1]).moments, scale, self.bound):
                    matching.append(known[at][1])
                at += 1
        return min(matching, default=None)


def _is_of_places(node: Node) -> bool:
    """Return whether these are places, which are the same numbers in another order whatever was sorted."""
    return node.operator in _PLACES and node.output > 0


def is_alike(found: Moments, right: Moments, scale: float, bound: float) -> bool:
    """Return whether two tensors have the same elements, one of them so many times, and the first `scale` times."""
    if found.hidden * right.count != right.hidden * found.count:
        return False
    ratio = found.count / right.count
    powers = (
        (found.first, right.first, right.first_size, 1),
        (found.second, right.second, right.second, 2),
        (found.third, right.third, right.third_size, 3),
        (found.first_size, right.first_size, right.first_size, 1),
    )
    return all(
        abs(one - two * ratio * scale**power) <= bound * power * size * ratio * scale**power
        for one, two, size, power in powers
    )
