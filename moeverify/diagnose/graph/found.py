"""What is otherwise in the graph of ranks, from the origin of a wrong tensor on, as data to be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.graph.edits import PARTS, Comparison, numbers_of
from moeverify.diagnose.graph.first_step import find_first_step
from moeverify.diagnose.graph.joined import Joint, OneDevice, Ranks, Recorded, Values, Where
from moeverify.diagnose.graph.mistakes import Edit, Edits, Mistakes
from moeverify.diagnose.graph.record import Graph, Node, is_alike
from moeverify.results.other_steps import OtherStep, OtherSteps, Term
from moeverify.train.module_taps import FORWARD, End

_DEEP, _DEEPER = 1, 2
"""Operators inside of operators that are named, each with what it takes."""


class Graphs:
    """The graphs of one device and of all ranks in the step where it began."""

    def __init__(self, golden: Graph, by_rank: Sequence[Graph], bound: float) -> None:
        self._one, self._by_rank, self._bound = OneDevice(golden), by_rank, bound

    def explain(self, origin: Origin) -> OtherSteps | None:
        """Return the steps that are otherwise where an origin was made; None where these are many."""
        where = (origin.direction, origin.module, origin.end, origin.slot)
        return self._explain(where, [graph.ends for graph in self._by_rank], self._one.graph.ends, origin)

    def explain_total(self, where: Where) -> OtherSteps | None:
        """Return the steps that are otherwise where a loss or the gradient of a parameter was made."""
        return self._explain(where, [graph.totals for graph in self._by_rank], self._one.graph.totals, None)

    def _explain(
        self,
        where: Where,
        noted: Sequence[Mapping[End, int]],
        golden: Mapping[End, int],
        origin: Origin | None,
    ) -> OtherSteps | None:
        number = next((node for end, node in golden.items() if end[:4] == where), None)
        having = [rank for rank, ends in enumerate(noted) if any(end[:4] == where for end in ends)]
        if number is None or not having:
            return None
        ranks = Ranks(having, self._by_rank)
        joint = ranks.find_all([noted[rank] for rank in having], where)
        values = Values(self._one, ranks, self._bound)
        edits = Comparison(values, of_sums=origin is None).compare(joint, (number,))
        if edits is None and origin is not None:
            begin = self._find_begin(origin)
            edits = find_first_step(values, number, begin, len(joint) // len(having) or 1)
        if edits is None or not all(_have_one_number(ranks, edit) for edit in edits):
            return None
        steps = self.tell(values, edits)
        if any(_says_nothing(step) for step in steps) or _exchanges(steps):
            return None
        return OtherSteps(steps=steps, num_ranks=len(having))

    def tell(self, values: Values, edits: Edits) -> tuple[OtherStep, ...]:
        """Return what is otherwise by the names of one device, in its order, each once."""
        mistakes = Mistakes(values)
        teller = _Teller(values, mistakes)
        return tuple(dict.fromkeys(teller.tell(group) for group in mistakes.group(edits)))

    def _find_begin(self, origin: Origin) -> int:
        """Return the node of one device at which the culprit begins, as its input, or the gradient of its output."""
        end = "input" if origin.direction == FORWARD else "output"
        ends = self._one.graph.ends.items()
        begun = [node for each, node in ends if each[:3] == (origin.direction, origin.culprit, end)]
        return min(begun, default=0)


class _Teller:
    """Describes nodes by the names that one device has for their values."""

    def __init__(self, values: Values, mistakes: Mistakes) -> None:
        self._values, self._one, self._ranks = values, values.one, values.ranks
        self._mistakes = mistakes

    def tell(self, group: Sequence[Edit]) -> OtherStep:
        """Return a step in terms of both; of several that are one mistake, the first or their modules."""
        edit = group[0]
        modules = self._mistakes.find_modules(edit) if len(group) > 1 else None
        if modules is not None:
            of_right, of_wrong = (Term(module=each, end="parameters") for each in modules)
            return OtherStep(way="operand", right=of_right, wrong=of_wrong)
        deep = _DEEPER if edit.way in ("other", "order") else _DEEP
        right = wrong = None
        if edit.way not in ("added", "index"):
            right = self._name(edit.right, deep, is_whole=True)
        if edit.way != "left-out":
            wrong = self._name_joint(edit.wrong, deep, is_whole=edit.way != "operand")
        factor = self._find_factor(edit) if edit.way in ("operand", "other") else None
        doing = self._ranks.owners(edit.wrong)
        some = doing if doing and len(doing) < len(self._ranks.graphs) else ()
        return OtherStep(way=edit.way, right=right, wrong=wrong, ranks=tuple(sorted(some)), factor=factor)

    def _find_factor(self, edit: Edit) -> float | None:
        """Return how many times the right elements the wrong ones are, where all are so many times them."""
        found, right = self._ranks.moments(edit.wrong), self._one.moments(edit.right)
        if not right.first_size:
            return None
        size = found.first_size / found.count / (right.first_size / right.count)
        factors = (size, -size) if size else ()
        return next((each for each in factors if is_alike(found, right, each, self._values.bound)), None)

    def _name(self, right: Joint, deep: int, *, is_whole: bool = False) -> Term:
        right = self._one.strip(right)
        node = self._one.node(right[0])
        if right in self._one.names and not (is_whole and node.operator and node.operator not in PARTS):
            direction, module, end, slot, _ = self._one.names[right]
            is_gradient = direction == "backward"
            named = "" if slot[:1].isdigit() else slot
            return Term(module=module, end=end, slot=named, is_gradient=is_gradient)
        if node.operator in PARTS and not is_whole and self._one.same(right) is not None:
            return self._name(self._one.args(right)[0], deep)
        args = tuple(self._name(each, deep - 1) for each in self._list_args(self._one, right)) if deep else ()
        return _make_term(node, args)

    def _name_joint(self, joint: Joint, deep: int, *, is_whole: bool = False) -> Term:
        joint = self._ranks.strip(joint)
        known = self._values.find(joint)
        node = self._ranks.node(joint[0])
        if known is not None and not (is_whole and node.operator and node.operator not in PARTS):
            return self._name(known, deep)
        if node.operator in PARTS and not is_whole and self._ranks.same(joint) is not None:
            return self._name_joint(self._ranks.args(joint)[0], deep)
        taken = self._list_args(self._ranks, joint) if deep else []
        return _make_term(node, tuple(self._name_joint(each, deep - 1) for each in taken))

    @staticmethod
    def _list_args(side: Recorded, joint: Joint) -> list[Joint]:
        """Return what the operator of a tensor takes, or that of its first node, where it has several."""
        return side.args(joint if side.same(joint) is not None else joint[:1])


def _have_one_number(ranks: Ranks, edit: Edit) -> bool:
    """Return whether ranks and micro-batches make a step with the same numbers: other ones have more to tell."""
    return not edit.wrong or len({numbers_of(node) for node in ranks.nodes(edit.wrong)}) == 1


def _exchanges(steps: Sequence[OtherStep]) -> bool:
    """Return whether two tensors stand in each other's places: as where chains were paired the wrong way."""
    pairs = [(each.right, each.wrong) for each in steps if each.way in ("operand", "other")]
    return any((wrong, right) in pairs for right, wrong in pairs)


def _says_nothing(step: OtherStep) -> bool:
    """Return whether one thing in the place of another tells nothing.

    Both sides read the same where what they are made of has no names. And one operator of more or fewer tensors, as
    the rows of all experts that are put together, is how a layout divides them.
    """
    if step.right is None or step.wrong is None:
        return False
    if step.way == "other" and step.right.operator == step.wrong.operator:
        return True
    return step.way == "operand" and _is_same(step.right, step.wrong)


def _is_same(one: Term, two: Term) -> bool:
    """Return whether two terms are equal but for their lines."""
    own = {"line": "", "args": ()}
    is_same = one.model_copy(update=own) == two.model_copy(update=own) and len(one.args) == len(two.args)
    return is_same and all(map(_is_same, one.args, two.args))


def _make_term(node: Node, args: tuple[Term, ...]) -> Term:
    return Term(
        name=node.name,
        operator=node.operator,
        options=tuple(each if isinstance(each, str) else f"{each:.6g}" for each in numbers_of(node)),
        line=node.site,
        args=args,
    )
