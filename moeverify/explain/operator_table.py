"""Comparison of the ranks' operators with another run's: each operator with its counterpart, value by value.

A counterpart is at the same place of the program: phase, module, operator and calling lines. Among several
(loops, micro-batches) the one with the nearest values is used. Parts of a sum are found by adding the
values of other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeverify.explain.operator_lists import MOST_OPERATORS, Listed
from moeverify.explain.relate import Reference, Relation
from moeverify.results.operator_table import (
    TABLE_VERSION,
    Compared,
    Operator,
    OperatorList,
    OperatorTable,
)

BOUNDS: Mapping[str, float] = {"float64": 1e-8, "float32": 2.0**-13, "bfloat16": 2.0**-4, "float16": 2.0**-4}
"""Maximum relative error of a match, by the narrowest dtype of any computation."""

_MOST_CANDIDATES = 5
_MOST_CALLS = 16
"""Maximum number of calls at one place of the program whose results are added."""

_MOST_LIKELY = 3
_MOST_RESULTS = 16
_MOST_REFERENCES = 1024
_ORDER = ("uncompared", "match", "multiple", "alone", "shape", "differs")
"""Outcomes of results, from best to worst. An operator has the worst outcome of its results."""

Key = tuple[object, ...]

At = tuple[int, int]
"""(rank, position of an operator in the rank's list)."""

ResultAt = tuple[int, int, int]
"""(rank, position of an operator, index of its result)."""

LookUp = Callable[[int, int], Compared | None]
"""Function that looks up a value by its content: (rank, number of the value in the recorded program)."""


def choose_bound(lists: Iterable[Listed]) -> float:
    """Return the maximum relative error of a match, for the narrowest dtype of any computation."""
    dtypes = {result.dtype for each in lists for op in each.operators.operators for result in op.results}
    return max((BOUNDS[dtype] for dtype in dtypes if dtype in BOUNDS), default=BOUNDS["float64"])


def list_keys(operators: OperatorList) -> Iterator[tuple[Key, ...]]:
    """Yield, for each operator, the keys that it shares with counterparts, the strictest first."""
    counts: dict[tuple[int, str], int] = {}
    for op in operators.operators:
        # The derivative of one operator may call another operator twice, once for each of two operands.
        part = counts[op.origin, op.name] = counts.get((op.origin, op.name), -1) + 1
        part = part if op.origin >= 0 else 0
        sites = [operators.sites[each] for each in op.sites[:2]]
        lines = tuple((site.file, site.line, site.offset) for site in sites)
        functions = tuple(site.function for site in sites[:1])
        kind = op.name.partition(".")[0].strip("_")
        shared = (op.phase, op.module)
        yield (*shared, op.name, part, lines), (*shared, kind, part, functions), (*shared, kind)


@dataclass(frozen=True)
class _Found:
    """A result on the other side and the relation to it.

    `over` names the sum that the value is a part of.
    """

    other: At
    slot: int
    relation: Relation
    over: str = ""


@dataclass(frozen=True)
class _Others:
    """Possible counterparts, the likeliest first.

    The first `num_near` are accepted as counterparts whatever they return.
    """

    ops: tuple[At, ...]
    num_near: int


def make_table(
    expected: Sequence[Listed],
    actual: Sequence[Listed],
    *,
    title: str,
    step: int,
    names: tuple[str, str],
    seconds: float,
    bound: float | None = None,
    look_up: LookUp | None = None,
    causes: Iterable[At] = (),
) -> OperatorTable:
    """Return the operators of both sides with the comparisons made within `seconds`.

    `names` are the names of the two sides. `causes` lists the first wrong operators of `actual` as (rank,
    number in the program). `bound` is the maximum relative error of a match; None chooses it by dtype.
    `look_up` finds values that have no match at their own place.
    """
    limit = choose_bound([*expected, *actual]) if bound is None else bound
    compared, late = _Comparison(expected, actual, limit, look_up).compare(seconds)
    left_out = sum(each.operators.left_out for each in (*expected, *actual))
    said = [
        (left_out, f"operators are not listed: a process has more than {MOST_OPERATORS}"),
        (late, "operators are not compared: the time was over"),
    ]
    return OperatorTable(
        version=TABLE_VERSION,
        title=title,
        step=step,
        expected_name=names[0],
        actual_name=names[1],
        bound=limit,
        expected=tuple(each.operators for each in expected),
        actual=tuple(each.operators for each in actual),
        compared=tuple(compared),
        causes=tuple(
            (rank, actual[rank].places[number])
            for rank, number in dict.fromkeys(causes)
            if number in actual[rank].places
        ),
        notes=tuple(f"{number} {text}" for number, text in said if number),
    )


class _Comparison:
    """Comparison of the lists of all ranks with those of another run."""

    def __init__(
        self,
        expected: Sequence[Listed],
        actual: Sequence[Listed],
        bound: float,
        look_up: LookUp | None = None,
    ) -> None:
        self._expected, self._actual, self._bound = expected, actual, bound
        self._look_up = look_up or (lambda rank, number: None)
        self._others: dict[Key, list[At]] = {}
        self._derivatives: dict[tuple[At, Key], list[At]] = {}
        for rank, listed in enumerate(expected):
            for place, keys in enumerate(list_keys(listed.operators)):
                for key in keys:
                    self._others.setdefault(key, []).append((rank, place))
                origin = listed.operators.operators[place].origin
                self._derivatives.setdefault(((rank, origin), keys[0][2:4]), []).append((rank, place))
        self._keys = [list(list_keys(listed.operators)) for listed in actual]
        self._own: dict[Key, list[list[int]]] = {}
        for rank, found in enumerate(self._keys):
            for place, (key, *_) in enumerate(found):
                own = self._own.setdefault(key, [[] for _ in actual])
                own[rank].append(place)
        self._occurrences = {
            (rank, place): count
            for own in self._own.values()
            for rank, places in enumerate(own)
            for count, place in enumerate(places)
        }
        self._readers: dict[ResultAt | None, list[At]] = {}
        for rank, listed in enumerate(expected):
            for place, taken in enumerate(listed.taken):
                for result in dict.fromkeys(taken):
                    self._readers.setdefault((rank, *result), []).append((rank, place))
        self._counterparts: dict[ResultAt, ResultAt] = {}
        self._groups = self._list_groups()
        self._references: dict[ResultAt, Reference] = {}
        self._sums: dict[tuple[bool, tuple[At, ...], int], Tensor | None] = {}

    def compare(self, seconds: float) -> tuple[list[tuple[Compared, ...]], int]:
        """Return the comparisons of all ranks, and the number of operators left out for lack of time."""
        end, late = time.monotonic() + seconds, 0
        rows: list[tuple[Compared, ...]] = []
        # Ranks take turns, so that all ranks lack the same part of the step when time runs out.
        found: list[list[Compared]] = [[] for _ in self._actual]
        for place in range(max((len(keys) for keys in self._keys), default=0)):
            is_late = time.monotonic() > end
            for rank, keys in enumerate(self._keys):
                if place < len(keys):
                    late += is_late
                    outcome = Compared(outcome="uncompared") if is_late else self._compare((rank, place))
                    found[rank].append(outcome)
        rows += [tuple(each) for each in found]
        return rows, late

    def _compare(self, at: At) -> Compared:
        """Return the relation of an operator's results to results of the other side."""
        listed, place = self._actual[at[0]], at[1]
        others = self._list_others(at)
        made = [
            self._compare_value(at, slot, data, others)
            for slot, data in enumerate(listed.data[place])
            if data is not None and not _is_blank(listed.operators.operators[place])
        ]
        if not made:
            first = others.ops[0] if others.num_near else (0, -1)
            return Compared(outcome="uncompared", other=first[1], other_rank=first[0])
        return max(made, key=lambda each: (_ORDER.index(each.outcome), each.error or 0.0))

    def _list_others(self, at: At) -> _Others:
        """Return the possible counterparts of an operator on the other side."""
        likely = [*self._list_derivatives(at), *self._list_readers(at)][:_MOST_LIKELY]
        found: dict[At, None] = dict.fromkeys(likely)
        num_near = 0
        for number, key in enumerate(self._keys[at[0]][at[1]]):
            others = self._others.get(key)
            if others:
                found |= dict.fromkeys(self._sort_by_occurrence(at, others))
                num_near = len(found) if number == 0 else num_near
                break
        return _Others(tuple(found)[:_MOST_CANDIDATES], max(num_near, len(likely[:1])))

    def _list_derivatives(self, at: At) -> list[At]:
        """Return operators of the same name among the derivatives of the forward operator's counterpart."""
        op = self._actual[at[0]].operators.operators[at[1]]
        derived = self._counterparts.get((at[0], op.origin, 0))
        return (
            []
            if derived is None
            else self._derivatives.get((derived[:2], self._keys[at[0]][at[1]][0][2:4]), [])
        )

    def _list_readers(self, at: At) -> list[At]:
        """Return operators of the same name that take most counterparts of this operator's operands."""
        counts: dict[At, int] = {}
        name = self._actual[at[0]].operators.operators[at[1]].name
        for place, slot in self._actual[at[0]].taken[at[1]]:
            for reader in self._readers.get(self._counterparts.get((at[0], place, slot)), ()):
                if self._expected[reader[0]].operators.operators[reader[1]].name == name:
                    counts[reader] = counts.get(reader, 0) + 1
        most = max(counts.values(), default=0)
        return self._sort_by_occurrence(at, [each for each, count in counts.items() if count == most])

    def _sort_by_occurrence(self, at: At, others: Sequence[At]) -> list[At]:
        """Return operators at one place of the program, nearest in the number of previous calls first."""
        same = [each for each in others if each[0] == at[0]]
        found = same if same and len(self._expected) == len(self._actual) else others
        if len(found) < 2:
            return list(found)
        first = self._occurrences[at] % len(found)
        order = sorted(range(len(found)), key=lambda place: abs(place - first))
        return [found[place] for place in order]

    def _compare_value(self, at: At, slot: int, data: Tensor, others: _Others) -> Compared:
        best = self._find_nearest(data, slot, others.ops)
        if best is None or best.relation.error > self._bound or best.relation.factor != 1.0:
            summed = self._find_sum(at, slot, data, others.ops)
            best = summed if summed is not None else best
        if best is not None and best.relation.error <= self._bound:
            self._counterparts[*at, slot] = (*best.other, best.slot)
            return self._describe(best)
        numbers = self._actual[at[0]].numbers
        known = self._look_up(at[0], numbers[at[1]][slot]) if numbers else None
        if known is not None:
            return self._place_known(at, slot, data, known)
        if not others.num_near:
            return Compared(outcome="alone")
        nearest = others.ops[0] if best is None else best.other
        self._counterparts[*at, slot] = (*nearest, slot if best is None else best.slot)
        if best is not None:
            return self._describe(best)
        return Compared(outcome="shape", other=nearest[1], other_rank=nearest[0])

    def _place_known(self, at: At, slot: int, data: Tensor, known: Compared) -> Compared:
        """Return the known relation of a value, with its place in its counterpart's result if it has one."""
        if known.other < 0:
            return known
        other = known.other_rank, known.other
        self._counterparts[*at, slot] = (*other, 0)
        found = self._find_nearest(data, 0, [other])
        is_part = found is not None and found.relation.error <= self._bound
        return self._describe(found) if is_part and found is not None else known

    def _find_nearest(self, data: Tensor, slot: int, others: Sequence[At]) -> _Found | None:
        """Return the nearest result of the other side, or None if none has a part of this shape."""
        best: _Found | None = None
        for other in others:
            results = self._expected[other[0]].data[other[1]]
            # Ranks may split a tensor differently, so try the results in all slots.
            for place in sorted(range(len(results)), key=lambda each: (each != slot, each))[:_MOST_RESULTS]:
                theirs = results[place]
                if theirs is None or theirs.is_floating_point() != data.is_floating_point():
                    continue
                relation = self._refer((*other, place), theirs).relate(data)
                if relation is None:
                    continue
                if best is None or _rank(relation, self._bound) < _rank(best.relation, self._bound):
                    best = _Found(other, place, relation)
                if relation.error <= self._bound and relation.factor == 1.0:
                    return best
        return best

    def _refer(self, key: ResultAt, data: Tensor) -> Reference:
        """Return a result of the other side as a cached reference."""
        if key not in self._references:
            if len(self._references) >= _MOST_REFERENCES:
                self._references.pop(next(iter(self._references)))
            self._references[key] = Reference(data, self._bound)
        return self._references[key]

    def _describe(self, found: _Found) -> Compared:
        relation, (rank, place) = found.relation, found.other
        is_right = relation.error <= self._bound
        return Compared(
            outcome="differs" if not is_right else "match" if relation.factor == 1.0 else "multiple",
            other=place,
            other_rank=rank,
            place=", ".join(each for each in (found.over, relation.place) if each),
            factor=relation.factor,
            error=relation.error,
        )

    def _find_sum(self, at: At, slot: int, data: Tensor, others: Sequence[At]) -> _Found | None:
        """Return the sum that a value is a part of: over ranks, or over calls at one place of the program."""
        if data.dtype == torch.bool or not others:
            return None
        for over, parts in self._list_sums(at):
            total = self._add(self._actual, parts, slot)
            if total is None or total.shape != data.shape:
                continue
            found = self._find_nearest(total, slot, others[:1])
            if found is not None and found.relation.error <= self._bound:
                return replace(found, over=over)
        return self._find_total(at, slot)

    def _find_total(self, at: At, slot: int) -> _Found | None:
        """Return a match if the results of all calls at one place add up to the total of the other side.

        The rows of micro-batches may differ between a rank and the single device.
        """
        key = self._keys[at[0]][at[1]][0]
        theirs: Sequence[At] = self._others.get(key, ())
        right = self._add(self._expected, theirs, slot) if len(theirs) <= _MOST_CALLS else None
        if right is None:
            return None
        for group in self._groups:
            parts = [(rank, place) for rank in group for place in self._own[key][rank]]
            if at[0] not in group or not len(theirs) < len(parts) <= len(group) * _MOST_CALLS:
                continue
            total = self._add(self._actual, parts, slot)
            relation = None if total is None else self._refer((-1, theirs[0][1], slot), right).relate(total)
            if relation is not None and relation.error <= self._bound:
                over = f"part of a sum over ranks {', '.join(map(str, group))} and calls"
                return _Found(theirs[0], slot, relation, over)
        return None

    def _list_sums(self, at: At) -> Iterator[tuple[str, tuple[At, ...]]]:
        own, occurrence = self._own[self._keys[at[0]][at[1]][0]], self._occurrences[at]
        for group in self._groups:
            if at[0] in group and all(occurrence < len(own[rank]) for rank in group):
                ranks = ", ".join(map(str, group))
                yield (
                    f"part of a sum over ranks {ranks}",
                    tuple((rank, own[rank][occurrence]) for rank in group),
                )
        if 1 < len(own[at[0]]) <= _MOST_CALLS:
            yield "part of a sum over calls", tuple((at[0], place) for place in own[at[0]])

    def _add(self, side: Sequence[Listed], parts: Sequence[At], slot: int) -> Tensor | None:
        """Return the sum of results; None if their shapes differ or one was not kept."""
        key = side is self._actual, tuple(parts), slot
        if key not in self._sums:
            values = [side[rank].data[place] for rank, place in parts]
            kept = [each[slot] if slot < len(each) else None for each in values]
            tensors = [each for each in kept if each is not None]
            is_sum = len(tensors) == len(kept) and len({each.shape for each in tensors}) == 1
            self._sums[key] = torch.stack(tensors).sum(0) if is_sum else None
        return self._sums[key]

    def _list_groups(self) -> list[tuple[int, ...]]:
        """Return the rank groups that sums may be over: those of the collectives, then all ranks."""
        groups = {
            op.ranks: None
            for listed in self._actual
            for op in listed.operators.operators
            if len(op.ranks) > 1
        }
        if len(self._actual) > 1:
            groups[tuple(range(len(self._actual)))] = None
        return [group for group in groups if max(group) < len(self._actual)]


def _is_blank(op: Operator) -> bool:
    """Return whether an operator allocates memory without writing to it."""
    return op.name.startswith(("empty", "new_empty"))


def _rank(relation: Relation, bound: float) -> tuple[bool, bool, float]:
    return relation.error > bound, relation.factor != 1.0, relation.error
