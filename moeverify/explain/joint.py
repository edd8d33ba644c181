"""Joint program of all ranks, which can be executed again with changes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.explain.meetings import execute as meet
from moeverify.explain.numbers import list_hidden_reads
from moeverify.explain.operators import NotExecutable, is_random, run
from moeverify.explain.program import Op, Program, Site, Value

At = tuple[int, int]
"""(rank, number of an operator or value in the rank's program)."""

Replacement = Callable[[Callable[[int], Tensor]], list[Tensor]]
"""Function that computes the results of an operator.

Its argument maps the number of a value to its data.
"""


@dataclass
class Changes:
    """Changes of an execution: `ops` replaces operators, `values` replaces data."""

    ops: dict[At, Replacement] = field(default_factory=dict)
    values: dict[At, Tensor] = field(default_factory=dict)

    def __or__(self, other: Changes) -> Changes:
        """Return the union of both; `other` has precedence."""
        return Changes({**self.ops, **other.ops}, {**self.values, **other.values})


class Joint:
    """Joint program of all ranks, whose collectives are executed together.

    `order` is a topological order of the operators of all ranks. A collective comes after the inputs of all
    its ranks. `constants` are numbers that the single device passes to operators, too.
    """

    def __init__(self, programs: Sequence[Program], constants: Collection[float] = ()) -> None:
        self.programs = list(programs)
        self.meetings = _find_meetings(self.programs)
        self._peers = {at: members for members in self.meetings for at in members}
        self._hidden: dict[At, At] = {}
        self.users = _list_users(self.programs)
        self._refs = [[list(op.refs()) for op in program.ops] for program in self.programs]
        self._reads = [[list(op.reads()) for op in program.ops] for program in self.programs]
        for rank, program in enumerate(self.programs):
            for number, value in list_hidden_reads(program, constants).items():
                self._hidden[rank, number] = (rank, value)
                self.users.setdefault((rank, value), []).append((rank, number))
        self._before: dict[tuple[At, ...], set[At]] = {}
        self.order = self._sort()
        self._place = {at: number for number, at in enumerate(self.order)}

    def op(self, at: At) -> Op:
        """Return an operator."""
        return self.programs[at[0]].ops[at[1]]

    def sites(self, op: At) -> tuple[Site, ...]:
        """Return the lines of an operator, or for a derivative the lines of its forward operator."""
        return self.programs[op[0]].sites_of(self.op(op))

    def value(self, at: At) -> Value:
        """Return a value."""
        return self.programs[at[0]].values[at[1]]

    def data(self, at: At) -> Tensor | None:
        """Return the recorded data of a value."""
        return self.programs[at[0]].values[at[1]].data

    def maker(self, at: At) -> At:
        """Return the operator that made a value."""
        return at[0], self.programs[at[0]].values[at[1]].op

    def results(self, op: At) -> list[At]:
        """Return the values that an operator makes."""
        return [(op[0], number) for number in self.op(op).results]

    def place(self, op: At) -> int:
        """Return the position of an operator in `order`."""
        return self._place[op]

    def sources(self, op: At) -> list[At]:
        """Return the values that an operator takes; for a collective, those of all ranks."""
        members = self._peers.get(op, (op,))
        return [(rank, number) for rank, each in members for number in self._refs[rank][each]]

    def reads(self, op: At) -> list[At]:
        """Return the values that an operator's results depend on; for a collective, those of all ranks."""
        members = self._peers.get(op, (op,))
        return [(rank, number) for rank, each in members for number in self._reads[rank][each]]

    def own_reads(self, op: At) -> list[At]:
        """Return the values that an operator reads on its own rank."""
        return [at for at in self.reads(op) if at[0] == op[0]]

    def needs(self, op: At) -> list[At]:
        """Return the values that an operator reads, and its hidden source (see `hidden`) if it has one."""
        hidden = self.hidden(op)
        return self.reads(op) if hidden is None else [*self.reads(op), hidden]

    def hidden(self, op: At) -> At | None:
        """Return the value from which a Python number among an operator's arguments was computed, or None."""
        return self._hidden.get(op)

    def members(self, op: At) -> tuple[At, ...]:
        """Return the operators of all ranks that form a collective, or the operator alone."""
        return self._peers.get(op, (op,))

    def _sort(self) -> list[At]:
        waiting: dict[At, int] = {}
        following: dict[At, list[At]] = {}
        for rank, program in enumerate(self.programs):
            for op in program.ops:
                at = (rank, op.number)
                makers = {self.maker(source) for source in self.sources(at)} - set(self.members(at))
                waiting[at] = len(makers)
                for maker in makers:
                    following.setdefault(maker, []).append(at)
        # Ranks take turns, so that operators executed at the same time are adjacent.
        ready = [(number, rank) for (rank, number), count in waiting.items() if count == 0]
        heapq.heapify(ready)
        order: list[At] = []
        while ready:
            number, rank = heapq.heappop(ready)
            order.append((rank, number))
            for at in following.get((rank, number), ()):
                waiting[at] -= 1
                if waiting[at] == 0:
                    heapq.heappush(ready, (at[1], at[0]))
        return order

    def execute(
        self, changes: Changes, wanted: Iterable[At] | None = None, base: Execution | None = None
    ) -> Execution:
        """Execute the operators that depend on `changes`, in addition to the changes of `base`.

        With `wanted`, execute only operators that these values need.
        """
        return Execution(self, changes, None if wanted is None else self.list_before(wanted), base)

    def list_before(self, values: Iterable[At]) -> set[At]:
        """Return all operators that the values depend on."""
        key = tuple(values)
        if key not in self._before:
            found: set[At] = set()
            waiting = [self.maker(at) for at in key]
            while waiting:
                op = waiting.pop()
                if op not in found:
                    found.update(self.members(op))
                    waiting += [self.maker(source) for source in self.sources(op)]
            self._before[key] = found
        return self._before[key]


class Execution:
    """Values under changes. `tainted` has the values that could not be computed again."""

    def __init__(
        self, joint: Joint, changes: Changes, needed: set[At] | None = None, base: Execution | None = None
    ) -> None:
        self._joint = joint
        self.changes: Changes = changes if base is None else base.changes | changes
        self._data: dict[At, Tensor] = {} if base is None else dict(base._data)
        self._data |= changes.values
        self.tainted: set[At] = set() if base is None else set(base.tainted)
        dirty: dict[At, None] = {}
        heap: list[tuple[int, At]] = []

        def touch(op: At) -> None:
            for each in joint.members(op):
                if each not in dirty and (needed is None or each in needed):
                    dirty[each] = None
                    heapq.heappush(heap, (joint.place(each), each))

        for op in changes.ops:
            touch(op)
        for at in changes.values:
            for user in joint.users.get(at, ()):
                touch(user)
        while heap:
            _, op = heapq.heappop(heap)
            for at in self._run(op):
                for user in joint.users.get(at, ()):
                    touch(user)
        self.tainted.difference_update(self.changes.values)

    def data(self, at: At) -> Tensor | None:
        """Return the data of a value under the changes."""
        return self._data[at] if at in self._data else self._joint.data(at)

    def has_other_choices(self, before: Sequence[At] = ()) -> bool:
        """Return whether integers have changed, in which case the recorded program may no longer apply.

        For example, split sizes are Python numbers computed from counts that the program has read. Only choices
        `before` the last of some values count, if these are given.
        """
        choice, places = self.first_choice(), [self._joint.place(self._joint.maker(at)) for at in before]
        return choice is not None and (not places or self._joint.place(choice) < max(places))

    def first_choice(self) -> At | None:
        """Return the first operator, in program order, with integer results that changed."""
        return min(self.list_choices(), key=self._joint.place, default=None)

    def list_choices(self) -> Iterator[At]:
        """Yield the operators with integer results that changed."""
        for at, data in self._data.items():
            if not data.is_floating_point() and data.dtype != torch.bool:
                yield self._joint.maker(at)

    @classmethod
    def meet_with(cls, joint: Joint, op: At, brought: Mapping[At, Tensor]) -> list[Tensor]:
        """Return the outputs of a collective on one rank, for other inputs of the ranks.

        Raises: NotExecutable.
        """
        execution = cls(joint, Changes(values=dict(brought)), set())
        return execution._meet(op, joint.op(op))

    def changed(self) -> Mapping[At, Tensor]:
        """Return the data of all changed values."""
        return self._data

    def _run(self, op: At) -> list[At]:
        """Execute an operator and return the results that changed."""
        recorded, results = self._joint.op(op), self._joint.results(op)
        if recorded.meeting is None and op not in self.changes.ops and is_random(recorded):
            return []  # random numbers do not depend on values
        hidden = self._joint.hidden(op)
        if (hidden is not None and hidden in self._data) or any(
            source in self.tainted for source in self._joint.sources(op)
        ):
            self.tainted.update(results)
            return results
        try:
            made = self._compute(op, recorded)
        except NotExecutable:
            self.tainted.update(results)
            return results
        found = []
        for at, data in zip(results, made, strict=False):
            if at in self.changes.values:
                continue
            self.tainted.discard(at)
            if not is_same(data, self.data(at)):
                self._data[at] = data
                found.append(at)
        return found

    def _compute(self, op: At, recorded: Op) -> list[Tensor]:
        rank = op[0]

        def lookup(number: int) -> Tensor:
            data = self.data((rank, number))
            if data is None:
                raise NotExecutable("value was not kept")
            return data

        if op in self.changes.ops:
            return self.changes.ops[op](lookup)
        if recorded.meeting is not None:
            return self._meet(op, recorded)
        return run(recorded, lookup)

    def _meet(self, op: At, recorded: Op) -> list[Tensor]:
        assert recorded.meeting is not None
        members = dict(self._joint.members(op))
        ranks = recorded.meeting.group.ranks
        kind = recorded.name.partition(".")[2]
        if kind == "send":
            return []
        if kind == "recv":
            sender = ranks[recorded.meeting.source]
            if sender not in members:
                raise NotExecutable("a message that nobody sent")
            sent = self.data((sender, next(self._joint.op((sender, members[sender])).refs())))
            if sent is None:
                raise NotExecutable("value was not kept")
            return _cut(sent.reshape(-1), recorded.kwargs["shapes"])
        if set(ranks) - set(members):
            raise NotExecutable("a collective that not all ranks issued")
        return meet_over(self._joint, op, [(rank, members[rank]) for rank in ranks], self.data)


def meet_over(
    joint: Joint, op: At, members: Sequence[At], read: Callable[[At], Tensor | None]
) -> list[Tensor]:
    """Return the outputs of a collective on one rank, for calls `members` in the order of a group.

    `read` returns the data of an operand. Raises: NotExecutable.
    """
    brought = [[read((rank, number)) for number in joint.op((rank, each)).refs()] for rank, each in members]
    kept = [[each for each in parts if each is not None] for parts in brought]
    if any(len(one) < len(two) for one, two in zip(kept, brought, strict=True)):
        raise NotExecutable("value was not kept")
    recorded, options = joint.op(op), [joint.op(each).kwargs for each in members]
    try:
        flat = meet(recorded.name.partition(".")[2], options, kept, list(members).index(op))
    except (
        IndexError,
        RuntimeError,
        ValueError,
    ) as error:  # changes may give other inputs, or another number
        raise NotExecutable(str(error)) from error
    return _cut(flat, recorded.kwargs["shapes"])


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split the flat result of a rank into its outputs."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    if sum(sizes) > flat.numel():
        raise NotExecutable("a collective that fills less than its outputs")
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def is_same(one: Tensor, two: Tensor | None) -> bool:
    """Return whether two tensors are equal up to the rounding of another order of operations."""
    if two is None or one.shape != two.shape or one.dtype != two.dtype:
        return False
    if torch.equal(one, two):
        return True
    if not one.is_floating_point() or not one.numel():
        return False
    tolerance = 4 * torch.finfo(one.dtype).eps
    sizes = two.abs()
    largest = sizes.max()
    if (one - two).abs_().max() > tolerance * largest:  # False for NaN
        return False
    sizes = sizes.nan_to_num(0.0)
    largest = sizes.max()
    others = sizes[sizes < largest]
    # A mask fills in one large number, which would inflate the tolerance of all other elements.
    is_filled = others.numel() and int((sizes == largest).sum()) > 1
    scale = float(others.max() if is_filled else largest)
    return bool(torch.isclose(one, two, rtol=0.0, atol=tolerance * scale, equal_nan=True).all())


def _find_meetings(programs: Sequence[Program]) -> list[tuple[At, ...]]:
    """Return the operators of all ranks that form each collective."""
    found: dict[tuple[object, ...], list[At]] = {}
    for rank, program in enumerate(programs):
        for op in program.ops:
            if op.meeting is not None:
                meeting = op.meeting
                key = (
                    meeting.group.name,
                    meeting.group.ranks,
                    meeting.sequence,
                    meeting.source,
                    meeting.target,
                )
                found.setdefault(key, []).append((rank, op.number))
    return [tuple(members) for members in found.values()]


def _list_users(programs: Sequence[Program]) -> dict[At, list[At]]:
    """Return the operators that take each value."""
    users: dict[At, list[At]] = {}
    for rank, program in enumerate(programs):
        for op in program.ops:
            for number in set(op.refs()):
                users.setdefault((rank, number), []).append((rank, op.number))
    return users
