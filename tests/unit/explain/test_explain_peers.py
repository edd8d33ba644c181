"""Messages of a ring that come from the wrong neighbor are a proved cause."""

from __future__ import annotations

from typing import Any

import pytest
from recordings import MARK, make
from torch import Tensor

from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.program import GroupRef, Meeting, Op, Program, Ref, Shown, Value
from moeverify.parallel.regions.region import Region
from moeverify.report.words.culprit import list_culprit

SIZE = 4
GROUPS = {"cp": [list(range(SIZE))]}
WHOLE = make(SIZE, 6)


class Recorder:
    """Records operators with their results."""

    def __init__(self, x: Tensor) -> None:
        self.ops, self.data = [Op(0, "memory.leaf", ([],), {}, (0,))], [x]

    def add(self, name: str, args: tuple[object, ...], data: Tensor, **kwargs: Any) -> int:
        """Record an operator with one result, and return the number of the result."""
        self.data.append(data)
        options, number = kwargs.pop("options", {}), len(self.data) - 1
        self.ops.append(Op(len(self.ops), name, args, options, (number,), step=0, **kwargs))
        return number

    def read(self, region: Region) -> Program:
        """Return the program, which shows its last value."""
        makers = {number: op.number for op in self.ops for number in op.results}
        values = [
            Value(at, makers[at], tuple(each.shape), "float64", each) for at, each in enumerate(self.data)
        ]
        values[0].label = "x"
        return Program(ops=self.ops, values=values, marks={MARK: [Shown(len(values) - 1, region)]})


def make_rank(rank: int, by: int) -> Program:
    """Return a program that passes a row twice around a ring, `by` ranks a turn, and adds all that it receives.

    One device has no numbers like those on their way.
    """
    group, rows = GroupRef("ring", tuple(range(SIZE))), WHOLE.exp()
    program = Recorder(WHOLE[rank : rank + 1])
    sent = program.add("aten.exp.default", (Ref(0),), rows[rank : rank + 1])
    total = 0
    for turn in range(2):
        meeting = Meeting(group, turn, rank, (rank + by) % SIZE)
        program.ops.append(
            Op(len(program.ops), "collective.send", ([Ref(sent)],), {}, (), step=0, meeting=meeting)
        )
        meeting = Meeting(group, turn, (rank - by) % SIZE, rank)
        row = rows[(rank - (turn + 1) * by) % SIZE][None]
        options = {"shapes": [(1, 6)]}
        sent = program.add("collective.recv", ([],), row, options=options, meeting=meeting)
        root = program.add("aten.pow.Tensor_Scalar", (Ref(sent), 0.3), row**0.3)
        sum_ = program.data[total] + row**0.3
        total = program.add("aten.add.Tensor", (Ref(total), Ref(root)), sum_)
    found = program.read(Region.box((SIZE, 6), [range(rank, rank + 1), range(6)]))
    found.shares = [((rank,), (0,))]
    return found


def make_one(by: int) -> Program:
    """Return the program of one device, which rolls all rows."""
    program = Recorder(WHOLE)
    total = WHOLE + (0.3 * WHOLE.roll(by, 0)).exp() + (0.3 * WHOLE.roll(2 * by, 0)).exp()
    program.add("aten.sum.default", (Ref(0),), total)
    return program.read(Region.box((SIZE, 6), [range(SIZE), range(6)]))


@pytest.mark.parametrize(("mine", "right"), [(1, -1), (1, 2)])
def test_a_message_from_the_wrong_neighbor_is_proved(mine: int, right: int) -> None:
    explainer = Explainer([make_rank(rank, mine) for rank in range(SIZE)], make_one(right), 0, [], GROUPS)
    (cause,) = explainer.explain(30.0)
    (edit,) = cause.repairs
    names = {-1: "the rank after", 2: "the rank 2 before"}
    assert (edit.kind, edit.place, edit.numbers) == (
        "group",
        ("ring", "cp"),
        (("the rank before", names[right]),),
    )
    assert len(edit.ops) == 2 * SIZE  # the second message depends on the first
    assert cause.residual is not None
    assert cause.residual < 1e-12
    rows = dict(list_culprit(Culprits(explainer).make(cause)))
    assert rows["here"] == f"received from the rank before in cp; right is the message from {names[right]}"


def test_right_messages_are_not_changed() -> None:
    explainer = Explainer([make_rank(rank, 1) for rank in range(SIZE)], make_one(1), 0, [], GROUPS)
    assert not explainer.wrong
    assert not explainer.explain(30.0)
