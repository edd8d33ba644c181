"""The fewest steps that ranks make otherwise than one device, between a tensor that is wrong and what is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from moeverify.diagnose.graph.joined import Joint, Recorded, Values, as_joint
from moeverify.diagnose.graph.mistakes import Edit, Edits, Mistakes, Way
from moeverify.diagnose.graph.record import MOVES_ROWS, OVER_DIMS, WRITE, Node

_MOST_EDITS = 3
_SKIPS = (0, 1, 3)
"""How many steps of one side may be passed by, each time with more to search."""

_MOST_PAIRS = 25_000
_MOST_DEEP = 300
_MOST_OPERATORS = 8
_MANY = 9

_COST = {
    "number": 2,
    "left-out": 3,
    "operand": 4,
    "function": 4,
    "added": 3,
    "order": 4,
    "index": 4,
    "other": 3,
}
_MOST_OF_ONE, _MOST_OF_SEVERAL = 20, 14
"""What one step, or several together, may cost to be told."""

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

_ADD = "add"
_COMMUTES = frozenset({"add", "mul", "add_", "mul_", "maximum", "minimum"})


@dataclass(frozen=True)
class _Left:
    """How many steps of one side may still be passed by, which side's was the last, and how far back the walk is.

    Steps of both sides one after the other would be one thing in the place of another, and are told so.
    """

    skips: int
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

    Two steps are the same where their operators and numbers are, and what they take is. The walk ends without an
    answer where more than `most` pairs of tensors are compared. Where it is one `of_sums` over tokens, parts of them
    that are made as the whole is are right, though their values say nothing.
    """

    def __init__(self, values: Values, most: int = _MOST_PAIRS, *, of_sums: bool = False) -> None:
        self._most, self._of_sums = most, of_sums
        self.values, self.one, self.ranks = values, values.one, values.ranks
        self._known: dict[tuple[Joint, Joint, int, Way | None], Edits | None] = {}
        self._mistakes = Mistakes(values)
        self._num_compared = 0
        self._made: dict[Joint, frozenset[Joint] | None] = {}

    def compare(self, joint: Joint, right: Joint) -> Edits | None:
        """Return what is otherwise on the way to a tensor of ranks; None where that is more than a few steps."""
        told: list[Edits] = []
        for skips in _SKIPS:
            found = self._compare(joint, right, _Left(skips))
            if self._num_compared > self._most:
                break
            told += [found] if found else []
        return min(told, key=self._price, default=None)

    def _compare(self, joint: Joint, right: Joint, left: _Left) -> Edits | None:
        self._num_compared += 1
        if self._num_compared > self._most:
            return None
        joint, right = self.ranks.strip(joint), self.one.strip(right)
        if self.values.match(joint, right):
            return frozenset()
        stripped = self.ranks.strip(joint, passes_moves=True)
        if stripped != joint and self._is_made(right):
            joint = stripped
        key = (joint, right, left.skips, left.last)
        if key in self._known:
            return self._known[key]
        if left.depth > _MOST_DEEP:
            return None
        if self._is_partial(joint, right):
            return frozenset() if self._of_sums else None
        found = [each for each in self._list_ways(joint, right, left) if each is not None]
        kept = [each for each in found if self._is_short(each)]
        self._known[key] = min(kept, key=self._price, default=None)
        return self._known[key]

    def _list_ways(self, joint: Joint, right: Joint, left: _Left) -> Iterator[Edits | None]:
        wanted, wrong = self.one.same(right), self.ranks.same(joint)
        if wanted is not None and wanted.operator:
            yield from self._pair(joint, right, wanted, left)
            if left.may_skip("left-out"):
                for arg in dict.fromkeys(self.one.args(right)):
                    yield _with(self._compare(joint, arg, left.skip("left-out")), Edit("left-out", right))
        if left.may_skip("added") and wrong is not None and wrong.operator:
            for each in dict.fromkeys(self.ranks.args(joint)):
                way: Way = "index" if wrong.operator in MOVES_ROWS else "added"
                edit = Edit(way, right, joint, each)
                yield _with(self._compare(each, right, left.skip("added")), edit)
        if wrong is None:
            yield from self._list_of_some(joint, right, left)
        if left.last is not None:
            return
        if self.values.find(joint) is not None:
            yield frozenset({Edit("operand", right, joint)})
        elif self._list_operators(joint) is not None and self._is_known(right):
            yield frozenset({Edit("other", right, joint)})

    def _pair(self, joint: Joint, right: Joint, wanted: Node, left: _Left) -> Iterator[Edits | None]:
        """Yield what is otherwise where both make a tensor by an operator of as many arguments."""
        mine, parts = self.ranks.parts(joint), self.one.parts(right)
        for one, other in ((mine, right), (joint, parts), (mine, parts)):
            # What is put together, of experts or chunks, is put together of more or fewer parts in a layout.
            if one is not None and other is not None and (one, other) != (joint, right):
                yield self._compare(one, other, left.go_on())
        added = self._list_added(joint) if wanted.operator != _ADD else joint
        if added != joint:
            yield self._compare(added, right, left.go_on())
        if len(right) > 1 and wanted.operator in PARTS:
            # Of experts' weights each rank takes those that have rows there.
            yield self._compare(self._whole(self.ranks, joint), self._whole(self.one, right), left.go_on())
        nodes = self.ranks.nodes(joint)
        if not all(each.operator and len(each.args) == len(wanted.args) for each in nodes):
            return
        own = self._find_own(joint, right, wanted)
        if own is None:
            return
        num_args = len(wanted.args)
        orders: Sequence[Sequence[int]] = [range(num_args)]
        if wanted.operator in _COMMUTES:
            orders = list(permutations(range(num_args)))
        taken, given = self.ranks.args(joint), self.one.args(right)
        for order in orders:
            pairs = [(each, given[place]) for place, each in zip(order, taken, strict=True)]
            found = self._compare_args(pairs, own, left.go_on())
            if found is not None:
                yield found or self._find_order(joint, right, pairs)

    def _find_order(self, joint: Joint, right: Joint, pairs: Sequence[tuple[Joint, Joint]]) -> Edits:
        """Return that other elements are brought together, where all that a step takes is right."""
        if self._of_sums and not all(self.values.match(*pair) for pair in pairs):
            return frozenset()  # of parts of sums, which are right as such
        way: Way = "index" if any(self._is_of_indices(arg) for _, arg in pairs) else "order"
        return frozenset({Edit(way, right, joint)})

    def _compare_args(self, pairs: Sequence[tuple[Joint, Joint]], own: Edits, left: _Left) -> Edits | None:
        """Return what is otherwise in what a step takes, and `own`, of the step itself.

        Which rows are taken from a tensor depends on where a layout has them: that is asked where nothing else is
        otherwise, and is no matter where it is made by other operators.
        """
        found = own
        has_rows = not own and not all(self._is_of_indices(arg) for _, arg in pairs)
        for each, arg in pairs:
            if not (has_rows and self._is_of_indices(arg)):
                further = self._compare(each, arg, left)
                if further is None:
                    return None
                found |= further
        for each, arg in pairs:
            if has_rows and not found and self._is_of_indices(arg):
                found |= self._compare(each, arg, left) or frozenset()
        return found

    def _find_own(self, joint: Joint, right: Joint, wanted: Node) -> Edits | None:
        """Return what is otherwise in the operator itself or its numbers, on all ranks or on some.

        None where that is more than one thing.
        """
        outputs = {each.output for each in self.one.nodes(right)}
        numbers = {numbers_of(each) for each in self.one.nodes(right)}
        nodes = dict(zip(joint, self.ranks.nodes(joint), strict=True))
        others = tuple(
            number
            for number, each in nodes.items()
            if each.operator != wanted.operator or each.output not in outputs
        )
        if others and self._is_of_indices(right):
            return None  # a layout finds places of its own in its own way
        if others:
            kinds = {nodes[number].operator for number in others}
            return frozenset({Edit("function", right, others)}) if len(kinds) == 1 else None
        if wanted.is_index and not wanted.args:
            return frozenset()  # as many places as a layout has
        changed = tuple(
            number
            for number, each in nodes.items()
            if not any(_are_near(numbers_of(each), known) for known in numbers)
        )
        return frozenset({Edit("number", right, changed)}) if changed else frozenset()

    def _list_of_some(self, joint: Joint, right: Joint, left: _Left) -> Iterator[Edits | None]:
        """Yield what some ranks make otherwise than the others: a step more, or one that they leave out."""
        wanted, given = self.one.same(right), self.one.args(right) if self.one.same(right) else []
        for some, others in self._divide(joint):
            if left.may_skip("added") and self._is_made_by_ranks(some):
                for each in dict.fromkeys(self.ranks.args(some)):
                    without = as_joint((*each, *others))
                    edit = Edit("added", right, some, each)
                    yield _with(self._compare(without, right, left.skip("added")), edit)
            node = self.ranks.same(others)
            is_made = node is not None and wanted is not None and node.operator == wanted.operator
            if not (left.may_skip("left-out") and is_made and len(self.ranks.args(others)) == len(given)):
                continue
            taken = self.ranks.args(others)
            for place, arg in enumerate(given):
                pairs = enumerate(zip(taken, given, strict=True))
                if all(self.values.match(*pair) for number, pair in pairs if number != place):
                    found = self._compare(as_joint((*some, *taken[place])), arg, left.skip("left-out"))
                    yield _with(found, Edit("left-out", right, some))

    def _divide(self, joint: Joint) -> Iterator[tuple[Joint, Joint]]:
        """Yield the nodes of some ranks, which are made by one operator, and those of the others."""
        by_kind: dict[tuple[str, int], list[int]] = {}
        for number, node in zip(joint, self.ranks.nodes(joint), strict=True):
            by_kind.setdefault((node.operator, len(node.args)), []).append(number)
        for members in by_kind.values():
            some, others = tuple(members), tuple(each for each in joint if each not in members)
            kinds = {node.operator for node in self.ranks.nodes(some)}
            if others and not kinds & PARTS and not self.ranks.owners(some) & self.ranks.owners(others):
                yield some, others

    @staticmethod
    def _whole(side: Recorded, joint: Joint) -> Joint:
        """Return what parts are of, in their place."""
        nodes = zip(joint, side.nodes(joint), strict=True)
        return as_joint(side.taken(each)[0] if node.operator in PARTS else each for each, node in nodes)

    def _list_added(self, joint: Joint) -> Joint:
        """Return what ranks add up, as micro-batches are, in the place of a sum over tokens."""
        wrong = self.ranks.same(joint)
        is_sum = self._of_sums and wrong is not None and wrong.operator.rstrip("_") == _ADD
        return as_joint(each for arg in self.ranks.args(joint) for each in arg) if is_sum else joint

    def _is_made(self, right: Joint) -> bool:
        return all(each.operator for each in self.one.nodes(right))

    def _is_made_by_ranks(self, joint: Joint) -> bool:
        node = self.ranks.same(joint)
        return node is not None and bool(node.operator)

    def _is_of_indices(self, right: Joint) -> bool:
        return all(each.is_index for each in self.one.nodes(right))

    def _is_partial(self, joint: Joint, right: Joint) -> bool:
        """Return whether ranks have partial sums there: they make all of it, each of a part of the right operands."""
        wanted, wrong = self.one.same(right), self.ranks.same(joint)
        if wrong is None or wanted is None:
            return False
        if (wrong.operator, len(wrong.args)) != (wanted.operator, len(wanted.args)):
            return False
        pairs = list(zip(self.ranks.args(joint), self.one.args(right), strict=True))
        if not all(self.values.match(each, arg) for each, arg in pairs):
            return False
        taken = [self.ranks.moments(each).count / self.one.moments(arg).count for each, arg in pairs]
        made = self.ranks.moments(joint).count / self.one.moments(right).count
        return made != min(taken, default=made)

    def _is_short(self, edits: Edits) -> bool:
        """Return whether an explanation is short: where it is long, ranks may just compute in another way."""
        num_groups = len(self._mistakes.group(edits))
        most = _MOST_OF_ONE if num_groups < 2 else _MOST_OF_SEVERAL
        return num_groups <= _MOST_EDITS and self._price(edits)[0] <= most

    def _price(self, edits: Edits) -> tuple[int, int]:
        """Return what edits cost: of two that explain, the simpler one is told."""
        own = sum(_COST[each[0].way] for each in self._mistakes.group(edits))
        made = [each.wrong for each in edits if each.way == "other"]
        for each in edits:
            if each.kept:
                made += [arg for arg in self.ranks.args(each.wrong) if arg != each.kept]
        operators = frozenset(one for joint in made for one in self._list_operators(joint) or ())
        unknown = sum(self._list_operators(joint) is None for joint in made)
        return own + 2 * len(operators) + _MANY * unknown, len(edits)

    def _list_operators(self, joint: Joint) -> frozenset[Joint] | None:
        """Return what ranks make on the way from right tensors to one, besides views and collectives.

        None where that is more than a few operators.
        """
        if joint not in self._made:
            self._made[joint] = None  # until it is known
            self._made[joint] = self._list_operators_anew(joint)
        return self._made[joint]

    def _list_operators_anew(self, joint: Joint) -> frozenset[Joint] | None:
        if self.values.find(joint) is not None:
            return frozenset()
        joint = self.ranks.strip(joint, passes_moves=True)
        wrong = self.ranks.same(joint)
        if wrong is None:
            return None
        if not wrong.operator:
            # What is neither on one device nor a parameter may be made where no operator is seen.
            return frozenset() if wrong.name else None
        is_plain = not wrong.args or wrong.operator in PARTS or wrong.operator == WRITE
        made = frozenset() if is_plain else frozenset({joint})
        for each in self.ranks.args(joint):
            further = self._list_operators(each)
            if further is None or len(made) > _MOST_OPERATORS:
                return None
            made |= further
        return made if len(made) <= _MOST_OPERATORS else None

    def _is_known(self, right: Joint) -> bool:
        return right in self.one.names or all(each.operator or each.name for each in self.one.nodes(right))


def _with(found: Edits | None, edit: Edit) -> Edits | None:
    return None if found is None else found | {edit}


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
