"""The graphs of all ranks and micro-batches as one, whose values are compared with those of one device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate
from operator import add

from moeverify.diagnose.graph.record import Graph, Moments, Node, is_alike
from moeverify.train.module_taps import End

Where = tuple[str, str, str, str]
"""An end of a module, as of `End`, in all micro-batches."""

Joint = tuple[int, ...]
"""The numbers of the nodes that are one tensor together, in order, each once.

On ranks these are nodes of every rank and micro-batch; on either side, those of all experts.
"""

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

_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})

_COUNTING = "arange"

_SPLITS = frozenset({"split", "split_with_sizes", "chunk", "unbind"})
"""Operators that give out a tensor in parts, each once."""

_JOINS = frozenset({"cat", "stack"})
"""Operators whose elements are all those of what they take."""

_MOST_SEVERAL = 5_000


class Recorded:
    """The nodes of several graphs, numbered one graph after another."""

    def __init__(self, graphs: Iterable[Graph]) -> None:
        self.graphs = list(graphs)
        self.begins = [0, *accumulate(len(graph.nodes) for graph in self.graphs)]
        self._nodes = [node for graph in self.graphs for node in graph.nodes]
        self._moments: dict[Joint, Moments] = {}
        self._stripped: dict[tuple[Joint, bool], Joint] = {}
        self._args: dict[Joint, list[Joint]] = {}

    def owner(self, number: int) -> int:
        """Return which graph a node is in."""
        return bisect_right(self.begins, number) - 1

    def node(self, number: int) -> Node:
        """Return a node by its number."""
        return self._nodes[number]

    def nodes(self, joint: Joint) -> list[Node]:
        """Return the nodes of a tensor."""
        return [self._nodes[number] for number in joint]

    def taken(self, number: int) -> list[int]:
        """Return the numbers of what the operator of a node has taken."""
        begin = self.begins[self.owner(number)]
        return [begin + arg for arg in self._nodes[number].args]

    def strip(self, joint: Joint, *, passes_moves: bool = False) -> Joint:
        """Return the nodes that first had these elements, or, before collectives, those of other ranks."""
        key = (joint, passes_moves)
        if key not in self._stripped:
            self._stripped[key] = self._strip(joint, passes_moves=passes_moves)
        return self._stripped[key]

    def _strip(self, joint: Joint, *, passes_moves: bool) -> Joint:
        while True:
            nodes = self.nodes(joint)
            moves = passes_moves and all(each.operator in _MOVES and len(each.args) == 1 for each in nodes)
            whole = as_joint(
                self.taken(number)[0] if moves or node.is_same else number
                for number, node in zip(joint, nodes, strict=True)
            )
            whole = self._join_parts(whole)
            if whole == joint:
                return joint
            joint = whole

    def _join_parts(self, joint: Joint) -> Joint:
        """Return what was split, in the place of all of its parts."""
        parts: dict[int, dict[int, list[int]]] = {}
        for number, node in zip(joint, self.nodes(joint), strict=True):
            if node.operator in _SPLITS:
                parts.setdefault(self.taken(number)[0], {}).setdefault(node.output, []).append(number)
        whole = {
            number: source
            for source, by_output in parts.items()
            if sum(self.node(each[0]).moments.count for each in by_output.values())
            == self.node(source).moments.count
            for number in (each for several in by_output.values() for each in several)
        }
        return as_joint(whole.get(number, number) for number in joint) if whole else joint

    def same(self, joint: Joint) -> Node | None:
        """Return the node of the first, where all are made by the same operator of as many arguments."""
        first = self._nodes[joint[0]]
        kind = (first.operator, len(first.args))
        is_same = len(joint) == 1 or all(
            (each.operator, len(each.args)) == kind for each in self.nodes(joint)
        )
        return first if is_same else None

    def args(self, joint: Joint) -> list[Joint]:
        """Return what the operator of a joint has taken, argument by argument."""
        if joint not in self._args:
            self._args[joint] = [as_joint(each) for each in zip(*map(self.taken, joint), strict=True)]
        return self._args[joint]

    def parts(self, joint: Joint) -> Joint | None:
        """Return the parts of which a tensor is put together, as one; None where it is not."""
        if not all(each.operator in _JOINS for each in self.nodes(joint)):
            return None
        return as_joint(arg for number in joint for arg in self.taken(number))

    def without_zeros(self, joint: Joint) -> Joint:
        """Return a tensor without what is zero by design, as a bias is on all ranks but one that add up."""
        nodes = zip(joint, self.nodes(joint), strict=True)
        return tuple(number for number, node in nodes if not _is_zero(node)) or joint

    def moments(self, joint: Joint) -> Moments:
        """Return the moments of what all have together."""
        if joint not in self._moments:
            self._moments[joint] = reduce(add, (each.moments for each in self.nodes(joint)))
        return self._moments[joint]


def _is_zero(node: Node) -> bool:
    is_made_so = node.operator in _ZEROS or (node.operator == "mul" and node.options == (0,))
    return is_made_so and node.moments.second == 0.0 and not node.moments.hidden


def as_joint(numbers: Iterable[int]) -> Joint:
    """Return nodes in order, each once."""
    return tuple(sorted(set(numbers)))


class OneDevice(Recorded):
    """The graph of one device."""

    def __init__(self, graph: Graph) -> None:
        super().__init__([graph])
        self.graph = graph
        self.names = {self.strip((number,)): end for end, number in reversed(graph.ends.items())}

    @cached_property
    def by_size(self) -> list[tuple[float, Joint]]:
        """Return the mean size of the elements of every tensor, of one node or of several, in order.

        Zeros and places in other tensors are alike wherever they come from: these are no tensor's in particular.
        """
        single = ((number,) for number, each in enumerate(self.graph.nodes) if not each.is_same)
        sized = (
            (self.moments(joint), joint)
            for joint in (*single, *self._list_several())
            if self._is_known(joint)
        )
        return sorted(
            (moments.first_size / moments.count, joint) for moments, joint in sized if moments.second
        )

    def _is_known(self, joint: Joint) -> bool:
        nodes = self.nodes(joint)
        return joint in self.names or not any(_is_of_places(each) for each in nodes)

    def _list_several(self) -> set[Joint]:
        """Return the tensors of several nodes that experts or chunks have made, and which are put together then."""
        found: set[Joint] = set()
        whole = (number for number, each in enumerate(self.graph.nodes) if each.operator in _JOINS)
        left = [self.parts((number,)) for number in whole]
        while left and len(found) < _MOST_SEVERAL:
            joint = self.strip(left.pop() or ())
            if len(joint) > 1 and joint not in found:
                found.add(joint)
                left += [self.parts(joint), *(self.args(joint) if self.same(joint) else ())]
        return found


class Ranks(Recorded):
    """The graphs of some of all ranks, of all their micro-batches."""

    def __init__(self, chosen: Sequence[int], by_rank: Sequence[Graph]) -> None:
        super().__init__(by_rank[rank] for rank in chosen)
        self.chosen = chosen

    def find_all(self, noted: Sequence[Mapping[End, int]], where: Where) -> Joint:
        """Return the nodes of every rank and micro-batch that are `noted` for an end."""
        return as_joint(
            begin + number
            for begin, ends in zip(self.begins[:-1], noted, strict=True)
            for end, number in ends.items()
            if end[:4] == where
        )

    def owners(self, joint: Joint) -> frozenset[int]:
        """Return the ranks that have a part of a tensor."""
        return frozenset(self.chosen[self.owner(number)] for number in joint)


class Values:
    """Says which tensors of ranks are those of one device: up to `bound`, or `scale` times these."""

    def __init__(self, one: OneDevice, ranks: Ranks, bound: float) -> None:
        self.one, self.ranks, self.bound = one, ranks, bound
        self.scales = sorted({1.0, *(graph.scale for graph in ranks.graphs)})
        self._found: dict[Joint, Joint | None] = {}
        self._matched: dict[tuple[Joint, Joint], bool] = {}

    def match(self, joint: Joint, right: Joint) -> bool:
        """Return whether ranks have together the elements of a tensor of one device, in any order."""
        if (joint, right) not in self._matched:
            self._matched[joint, right] = self._match(joint, right)
        return self._matched[joint, right]

    def _match(self, joint: Joint, right: Joint) -> bool:
        wanted, other = self.one.same(right), self.ranks.same(joint)
        if other is not None and _is_of_places(other) and other.args:
            is_same = wanted is not None and (wanted.operator, wanted.output) == (
                other.operator,
                other.output,
            )
            return is_same and self.match(self.ranks.args(joint)[0], self.one.args(right)[0])
        moments, scales = self.one.moments(right), self._list_scales(joint)
        return any(
            is_alike(self.ranks.moments(each), moments, scale, self.bound)
            for each in (joint, self.ranks.without_zeros(joint))
            for scale in scales
        )

    def _list_scales(self, joint: Joint) -> Sequence[float]:
        """Return how many times the right values may be: gradients alone are those of a scaled loss."""
        return self.scales if all(each.is_backward for each in self.ranks.nodes(joint)) else (1.0,)

    def find(self, joint: Joint) -> Joint | None:
        """Return the first tensor of one device that has the elements which ranks have together."""
        if joint not in self._found:
            self._found[joint] = min(self._find(joint), default=None)
        return self._found[joint]

    def _find(self, joint: Joint) -> Iterator[Joint]:
        found, node = self.ranks.moments(joint), self.ranks.same(joint)
        if node is not None and _is_of_places(node):
            return
        known = self.one.by_size
        for scale in self._list_scales(joint):
            size = found.first_size / found.count / scale
            width = self.bound * size
            at = bisect_left(known, (size - width, ()))
            while at < len(known) and known[at][0] <= size + width:
                if is_alike(found, self.one.moments(known[at][1]), scale, self.bound):
                    yield known[at][1]
                at += 1


def _is_of_places(node: Node) -> bool:
    """Return whether these are places, which are the same numbers in another order whatever was sorted."""
    return node.is_index and (node.operator == _COUNTING or (node.operator in _PLACES and node.output > 0))
