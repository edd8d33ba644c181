"""The fewest steps that ranks make otherwise than one device, between a tensor that is wrong and what is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from moeverify.diagnose.graph.joined import Joint, Values
from moeverify.diagnose.graph.record import OVER_DIMS, Node

Way = Literal["number", "function", "left-out", "added", "operand", "order", "other"]

_MOST_EDITS = 3
_MOST_SKIPS = 3
_MOST_PAIRS = 20_000
_MOST_DEEP = 300
_MOST_OPERATORS = 4
_MANY = 9

_COST = {"number": 2, "left-out": 3, "operand": 4, "function": 4, "added": 3, "order": 4, "other": 3}
_OF_NUMBERS = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "pow",
        "clamp",
        "clamp_min",
        "clamp_max",
        "remainder",
        "floor_divide",
    }
)
"""Operators whose integers are numbers to compute with, and no dims."""

PARTS = frozenset({"split", "split_with_sizes", "slice", "select", "expand", "unbind", "chunk", "narrow"})
"""Operators that give out a part of a tensor, or repeat it."""

_COMMUTES = frozenset({"add", "mul", "add_", "mul_", "maximum", "minimum"})


@dataclass(frozen=True)
class Edit:
    """One step that is otherwise: `right` is the node of one device, `wrong` those of the ranks.

    A step that is `added` stands between `kept`, of what it takes, and what one device makes of that.
    """

    way: Way
    right: int
    wrong: Joint = ()
    kept: Joint = ()


Edits = frozenset[Edit]


@dataclass(frozen=True)
class _Left:
    """How many steps of one side may still be passed by, which side's was the last, and how far back the walk is.

    Steps of both sides one after the other would be one thing in the place of another, and are told so.
    """

    skips: int = _MOST_SKIPS
    last: Way | None = None
    depth: int = 0

    def may_skip(self, way: Way) -> bool:
        """Return whether a step may be passed by."""
        return self.skips > 0 and self.last in (None, way)

    def skip(self, way: Way) -> _Left:
        """Return what is left after a step of one side."""
        return _Left(self.skips - 1, way, self.depth + 1)

    def go_on(self) -> _Left:
        """Return what is left after a step that both sides make."""
        return _Left(self.skips, None, self.depth + 1)


class Comparison:
    """Walks back from a tensor that is wrong, on ranks and on one device at once, to what is right.

    Two steps are the same where their operators and numbers are, and what they take is.
    """

    def __init__(self, values: Values) -> None:
        self.values, self.one, self.ranks = values, values.one, values.ranks
        self._known: dict[tuple[Joint, int, int, Way | None], Edits | None] = {}
        self._counts: dict[Joint, int] = {}

    def compare(self, joint: Joint, number: int) -> Edits | None:
        """Return what is otherwise on the way to a tensor of ranks; None where that is more than a few steps."""
        found = self._compare(joint, number, _Left())
        return found if found and len(self._known) <= _MOST_PAIRS else None

    def _compare(self, joint: Joint, number: int, left: _Left) -> Edits | None:
        joint, number = self.ranks.strip(joint), self.one.strip(number)
        if self.values.match(joint, number):
            return frozenset()
        stripped = self.ranks.strip(joint, passes_moves=True)
        if stripped != joint and self.one.node(number).operator:
            joint = stripped
        key = (joint, number, left.skips, left.last)
        if key in self._known:
            return self._known[key]
        if left.depth > _MOST_DEEP or len(self._known) > _MOST_PAIRS or self._is_partial(joint, number):
            return None
        found = [each for each in self._list_ways(joint, number, left) if each is not None]
        kept = [each for each in found if len(each) <= _MOST_EDITS]
        self._known[key] = min(kept, key=self._price, default=None)
        return self._known[key]

    def _list_ways(self, joint: Joint, number: int, left: _Left) -> Iterator[Edits | None]:
        right, wrong = self.one.node(number), self.ranks.same(joint)
        other = self.values.find(joint)
        is_made = bool(right.operator) and wrong is not None and bool(wrong.operator)
        if is_made and wrong is not None and len(wrong.args) == len(right.args):
            yield from self._pair(joint, number, wrong, right, left)
        if left.may_skip("left-out") and right.operator:
            for arg in dict.fromkeys(right.args):
                found = self._compare(joint, arg, left.skip("left-out"))
                yield None if found is None else found | {Edit("left-out", number)}
        if left.may_skip("added") and wrong is not None and wrong.operator:
            for each in dict.fromkeys(self.ranks.args(joint)):
                found = self._compare(each, number, left.skip("added"))
                yield None if found is None else found | {Edit("added", number, joint, each)}
        if left.last is not None:
            return
        if other is not None:
            yield frozenset({Edit("operand", number, joint)})
        elif self._is_short(joint) and self._is_known(number):
            yield frozenset({Edit("other", number, joint)})

    def _pair(
        self, joint: Joint, number: int, wrong: Node, right: Node, left: _Left
    ) -> Iterator[Edits | None]:
        """Yield what is otherwise where both make a tensor by an operator of as many arguments."""
        is_same_operator = wrong.operator == right.operator and wrong.output == right.output
        own: Edits = frozenset()
        if not is_same_operator:
            own = frozenset({Edit("function", number, joint)})
        elif not self._have_same_numbers(joint, right):
            own = frozenset({Edit("number", number, joint)})
        orders: Sequence[Sequence[int]] = [range(len(right.args))]
        if right.operator in _COMMUTES:
            orders = list(permutations(range(len(right.args))))
        taken = self.ranks.args(joint)
        for order in orders:
            found: Edits | None = own
            for place, each in zip(order, taken, strict=True):
                further = self._compare(each, right.args[place], left.go_on())
                found = None if further is None or found is None else found | further
                if found is None:
                    break
            if found is not None:
                yield found or frozenset({Edit("order", number, joint)})

    def _have_same_numbers(self, joint: Joint, right: Node) -> bool:
        wanted = numbers_of(right)
        return all(_are_near(numbers_of(each), wanted) for each in self.ranks.nodes(joint))

    def _is_partial(self, joint: Joint, number: int) -> bool:
        """Return whether ranks have partial sums there: they make all of it, each of a part of the right operands."""
        right, wrong = self.one.node(number), self.ranks.same(joint)
        if wrong is None or (wrong.operator, len(wrong.args)) != (right.operator, len(right.args)):
            return False
        pairs = list(zip(self.ranks.args(joint), right.args, strict=True))
        if not all(self.values.match(each, arg) for each, arg in pairs):
            return False
        taken = [self.ranks.moments(each).count / self.one.node(arg).moments.count for each, arg in pairs]
        made = self.ranks.moments(joint).count / right.moments.count
        return made != min(taken, default=made)

    def _is_short(self, joint: Joint, left: int = _MOST_OPERATORS) -> bool:
        """Return whether ranks make a tensor from right ones in a few operators, besides views and collectives."""
        if self.values.find(joint) is not None:
            return True
        joint = self.ranks.strip(joint, passes_moves=True)
        wrong = self.ranks.same(joint)
        if wrong is None or not wrong.operator or left < 0:
            return wrong is not None and not wrong.operator
        cost = 0 if wrong.operator in PARTS else 1
        return all(self._is_short(each, left - cost) for each in self.ranks.args(joint))

    def _price(self, edits: Edits) -> tuple[int, int]:
        """Return what edits cost: of two that explain, the simpler one is told."""
        own = sum(_COST[each.way] for each in edits)
        made = [each.wrong for each in edits if each.way == "other"]
        for each in edits:
            if each.way == "added":
                made += [arg for arg in self.ranks.args(each.wrong) if arg != each.kept]
        return own + sum(2 * self._count(joint) for joint in made), len(edits)

    def _count(self, joint: Joint) -> int:
        """Return by how many operators ranks make a tensor from right ones, besides views and collectives."""
        if joint not in self._counts:
            self._counts[joint] = _MANY  # until it is known
            self._counts[joint] = min(_MANY, self._count_anew(joint))
        return self._counts[joint]

    def _count_anew(self, joint: Joint) -> int:
        if self.values.find(joint) is not None:
            return 0
        joint = self.ranks.strip(joint, passes_moves=True)
        wrong = self.ranks.same(joint)
        if wrong is None:
            return _MANY
        return (0 if wrong.operator in PARTS else 1) + sum(map(self._count, self.ranks.args(joint)))

    def _is_known(self, number: int) -> bool:
        return (
            bool(self.one.node(number).operator)
            or number in self.one.names
            or bool(self.one.node(number).name)
        )


def numbers_of(node: Node) -> tuple[float | str, ...]:
    """Return the numbers and words that change what an operator computes; sizes depend on the layout."""
    operator = node.operator
    has_integers = operator.rstrip("_") in _OF_NUMBERS or operator in OVER_DIMS or not node.args
    kinds = int | float | str if has_integers else float | str
    return tuple(each for each in node.options if isinstance(each, kinds) and not isinstance(each, bool))


def _are_near(found: Sequence[float | str], wanted: Sequence[float | str]) -> bool:
    return len(found) == len(wanted) and all(
        one == two
        if isinstance(one, str) or isinstance(two, str)
        else one == two or abs(one - two) <= 1e-9 * min(abs(one), abs(two))
        for one, two in zip(found, wanted, strict=True)
    )
