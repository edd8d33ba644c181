"""A process group that has wrong ranks is wrong wherever it is used: it is named, and so is the call that made it."""

from __future__ import annotations

import torch
from recordings import MARK, make
from torch import Tensor

from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.program import GroupRef, Meeting, Op, Program, Ref, Shown, Site, Value
from moeverify.parallel.regions.region import Region
from moeverify.report.words.culprit import list_culprit

GROUPS = {"dp": [[0, 1], [2, 3]], "dp and cp": [[0, 1, 2, 3]]}
SHAPE = (6, 4)
MADE = Site(__file__, 1, "make_team")


def compute(x: Tensor, total: Tensor) -> list[Tensor]:
    """Return the values after a first sum over ranks: its sum, and the part times this sum."""
    return [total, total.sum(), x * total.sum()]


def make_rank(part: Tensor, ranks: tuple[int, ...], parts: list[Tensor], uses: int) -> Program:
    """Return a program that sums a part, scales it by the result, sums again if it `uses` the group twice."""
    scaled = [compute(each, torch.stack(parts).sum(0))[-1] for each in parts]
    data = [part, *compute(part, torch.stack(parts).sum(0))]
    ops = [
        Op(0, "memory.leaf", ([],), {}, (0,)),
        Op(2, "aten.sum.default", (Ref(1),), {}, (2,), step=0),
        Op(3, "aten.mul.Tensor", (Ref(0), Ref(2)), {}, (3,), step=0),
    ]
    shape = tuple(part.shape)

    def meet(number: int, taken: int, sequence: int) -> Op:
        options = {"reduction": "sum", "shapes": [shape]}
        group = GroupRef("team", ranks)
        found = Op(number, "collective.all_reduce", ([Ref(taken)],), options, (number,), step=0)
        found.meeting, found.sites = Meeting(group, sequence), (Site(__file__, number + 1, "run"),)
        return found

    if ranks:
        ops.insert(1, meet(1, 0, 1))
    else:
        ops.insert(1, Op(1, "aten.mul.Tensor", (Ref(0), 1.0), {}, (1,), step=0))
    if uses == 2:
        ops.append(meet(4, 3, 2) if ranks else Op(4, "aten.mul.Tensor", (Ref(3), 1.0), {}, (4,), step=0))
        data.append(torch.stack(scaled).sum(0))
    last = len(ops)
    ops.append(Op(last, "aten.sin.default", (Ref(last - 1),), {}, (last,), step=0))
    data.append(data[-1].sin())
    values = [Value(number, number, tuple(each.shape), "float64", each) for number, each in enumerate(data)]
    values[0].label = "x"
    program = Program(ops=ops, values=values, marks={MARK: [Shown(last, Region.whole(shape))]})
    program.groups = {"team": [(MADE,)]} if ranks else {}
    program.shares = [((0,), (0,))]
    return program


def explain(uses: int = 2) -> Explainer:
    parts = [make(*SHAPE, seed=seed) for seed in range(4)]
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    ranks = [
        make_rank(part, pair, [parts[each] for each in pair], uses)
        for part, pair in zip(parts, pairs, strict=True)
    ]
    return Explainer(ranks, make_rank(torch.stack(parts).sum(0), (), [sum(parts)], uses), 0, (), GROUPS)


def test_all_collectives_of_a_wrong_group_are_repaired_together_and_the_group_is_named() -> None:
    explainer = explain()
    (cause,) = explainer.explain(20.0)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.proved, culprit.repaired) == ("group", True, ("loss/total",))
    assert {number for _, number in cause.ops} == {1, 4}
    assert (culprit.numbers, culprit.axes) == ((("dp", "dp and cp"),), ("dp", "cp"))
    assert culprit.made is not None
    assert culprit.made.line is not None
    assert culprit.made.line.function == "make_team"
    headline, here = (text for _, text in list_culprit(culprit)[:2])
    assert headline.startswith("wrong process group: made by")
    assert here.endswith("; all results of the group are right over dp and cp")


def test_a_group_that_one_collective_uses_is_named_by_the_collective() -> None:
    explainer = explain(uses=1)
    (cause,) = explainer.explain(20.0)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.numbers, culprit.made) == ("group", (("dp", "dp and cp"),), None)
