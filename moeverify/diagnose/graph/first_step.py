"""The first step of one device that ranks do not make, where they compute by other operators further on.

Attention over a ring, say, has no scores as one device has them, but norms and rotations before it are the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from moeverify.diagnose.graph.edits import Comparison, numbers_of
from moeverify.diagnose.graph.joined import Joint, OneDevice, Ranks, Values, as_joint
from moeverify.diagnose.graph.mistakes import Edit, Edits
from moeverify.diagnose.graph.record import Graph, Node

_MOST_STEPS = 400
_MOST_PAIRS = 500  # what the step takes is right, so the walk is short where it finds something
_WAYS = ("number", "function", "operand")


def find_first_step(values: Values, root: int, begin: int, num_micro_batches: int = 1) -> Edits | None:
    """Return what ranks make in the place of the first step, of those that lead to `root`, which none of them makes.

    `begin` is the first node of the module on one device. All that the step takes must be there on ranks, and they
    must make one thing of it in place of the other: another operator, another number, or from another tensor.
    """
    one, ranks = values.one, values.ranks
    joints = _Joints(ranks, num_micro_batches)
    steps = sorted(_list_before(one, root, begin))[:_MOST_STEPS]
    missing = {number for number in steps if not joints.has(number, values)}
    users = [set(_strip_args(one, number)) for number in missing]
    # What only leads to steps that ranks do make may be made in another way, as -x / 2 and x / -2 are.
    needed = {
        number for number in missing if number == _strip(one, root) or any(number in each for each in users)
    }
    for number in sorted(needed):
        node = one.node(number)
        if not all(joints.has(arg, values) for arg in _strip_args(one, number)):
            return None
        found = list(_list_edits(number, node, joints, values))
        kinds = {_describe(edit, ranks) for (edit,) in found}
        # Layers after this one may do so too, in the same line.
        return min(found, key=lambda edits: min(edit.wrong for edit in edits)) if len(kinds) == 1 else None
    return None


def _describe(edit: Edit, ranks: Ranks) -> tuple[object, ...]:
    node = ranks.nodes(edit.wrong)[0]
    return edit.way, node.operator, node.site, numbers_of(node)


def _list_before(one: OneDevice, root: int, begin: int) -> set[int]:
    """Return the steps that a node of one device is made by, from the beginning of its module on."""
    found: set[int] = set()
    left = [_strip(one, root)]
    while left:
        number = left.pop()
        if number >= begin and number not in found and one.node(number).operator:
            found.add(number)
            left += _strip_args(one, number)
    return found


def _strip(one: OneDevice, number: int) -> int:
    (stripped,) = one.strip((number,))
    return stripped


def _strip_args(one: OneDevice, number: int) -> list[int]:
    return [_strip(one, arg) for arg in one.node(number).args]


def _list_edits(number: int, right: Node, joints: _Joints, values: Values) -> Iterator[Edits]:
    """Yield what is otherwise in each step of ranks that may be in the place of one."""
    for joint in joints.of_count(right.moments.count, len(right.args)):
        edits = (
            Comparison(values, _MOST_PAIRS).compare(joint, (number,)) if values.find(joint) is None else None
        )
        if edits and len(edits) == 1 and all(each.way in _WAYS for each in edits):
            yield edits


class _Joints:
    """The steps of all ranks and micro-batches, paired by their place among those of one operator in one line."""

    def __init__(self, ranks: Ranks, times: int) -> None:
        self._ranks = ranks
        self._all = list(_pair(ranks, times))
        sizes = ((ranks.moments(joint), joint) for joint in self._all)
        self._by_size = sorted((moments.first_size / moments.count, joint) for moments, joint in sizes)

    def has(self, number: int, values: Values) -> bool:
        """Return whether ranks have together the elements of a node of one device."""
        right = values.one.node(number).moments
        for scale in values.scales:
            size = right.first_size / right.count * scale
            width = values.bound * size
            at = bisect_left(self._by_size, (size - width, ()))
            while at < len(self._by_size) and self._by_size[at][0] <= size + width:
                if values.match(self._by_size[at][1], (number,)):
                    return True
                at += 1
        return False

    def of_count(self, count: int, num_args: int) -> Iterator[Joint]:
        """Yield those as large as a tensor of one device, divided or whole on each, made of as many others."""
        for joint in self._all:
            node = self._ranks.same(joint)
            found = self._ranks.moments(joint).count
            is_alike = node is not None and node.operator and len(node.args) == num_args and not node.is_same
            if is_alike and found in (count, count * len(joint)):
                yield joint


def _pair(ranks: Ranks, times: int) -> Iterator[Joint]:
    """Yield the steps of all ranks and micro-batches, of which there are so many."""
    by_key = [_list_by_key(graph, begin) for graph, begin in zip(ranks.graphs, ranks.begins, strict=False)]
    for key, members in by_key[0].items():
        if len(members) % times == 0 and all(len(each.get(key, ())) == len(members) for each in by_key):
            count = len(members) // times
            for place in range(count):
                yield as_joint(number for each in by_key for number in each[key][place::count])


def _list_by_key(graph: Graph, begin: int) -> dict[tuple[str, int, str], list[int]]:
    found: dict[tuple[str, int, str], list[int]] = {}
    for number, node in enumerate(graph.nodes, begin):
        found.setdefault((node.operator, node.output, node.site), []).append(number)
    return found
