"""Collectives over the ranks of a wrong mesh axis: the group is named, and the right one is proved by execution."""

from __future__ import annotations

import pytest
import torch
from recordings import MARK, make, record_call
from torch import Tensor

from moeverify.explain import known
from moeverify.explain.agreement import Agreement
from moeverify.explain.align import Alignment
from moeverify.explain.branches import Branches
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Joint, meet_over
from moeverify.explain.operators import NotExecutable
from moeverify.explain.program import GroupRef, Meeting, Op, Program, Ref, Shown, Site, Value
from moeverify.explain.regroup import list_reductions, list_regroupings, name_ranks
from moeverify.explain.user_lines import UserLines
from moeverify.parallel.regions.region import Region
from moeverify.report.words.culprit import list_culprit
from moeverify.results.cause import Cause

GROUPS = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
SHAPE = (6, 4)


def make_parts() -> list[Tensor]:
    """Return the parts of four ranks; those of the first two add up to the first rows, the others to the last."""
    wholes, parts = (
        (make(*SHAPE, seed=seed) for seed in range(2)),
        (make(*SHAPE, seed=seed) for seed in (2, 3)),
    )
    return [each for whole, part in zip(wholes, parts, strict=True) for each in (part, whole - part)]


def make_rank(
    part: Tensor, ranks: tuple[int, ...] = (), parts: tuple[Tensor, ...] = (), half: int | None = None
) -> Program:
    """Return a program that doubles a part, sums it over `ranks`, whose parts are `parts`, and takes the sine.

    The result is one half of the rows, or all.
    """
    shape = tuple(part.shape)
    ops = [
        Op(0, "memory.leaf", ([],), {}, (0,)),
        Op(1, "aten.mul.Tensor", (Ref(0), 2.0), {}, (1,), step=0),
    ]
    data = [part, part * 2]
    if ranks:
        meeting = Meeting(GroupRef(f"group {ranks}", ranks), 1)
        options = {"reduction": "sum", "shapes": [shape]}
        ops.append(Op(2, "collective.all_reduce", ([Ref(1)],), options, (2,), step=0, meeting=meeting))
        data.append(torch.stack(parts).sum(0) * 2)
    last = len(ops)
    ops.append(Op(last, "aten.sin.default", (Ref(last - 1),), {}, (last,), step=0))
    data.append(data[-1].sin())
    values = [Value(number, number, shape, "float64", each) for number, each in enumerate(data)]
    values[0].label = "x"
    rows = range(shape[0]) if half is None else range(half * shape[0], (half + 1) * shape[0])
    region = Region.box((shape[0] * (1 if half is None else 2), shape[1]), [rows, range(shape[1])])
    program = Program(ops=ops, values=values, marks={MARK: [Shown(last, region)]})
    program.shares = [((tuple(rows)), (0,))]
    return program


@pytest.fixture(autouse=True)
def use_all_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks add up over tp, too, as a collective elsewhere in a real program does."""
    monkeypatch.setattr(known, "_list_groups", lambda joint: [(0, 1), (2, 3), (0, 2), (1, 3)])


def explain(axis: str, groups: dict[str, list[list[int]]] = GROUPS) -> Explainer:
    parts = make_parts()
    ranks = []
    for rank, part in enumerate(parts):
        group = next((each for each in GROUPS.get(axis, []) if rank in each), [0, 1, 2, 3])
        own = tuple(parts[each] for each in group)
        ranks.append(make_rank(part, tuple(group), own, half=rank // 2))
    one = make_rank(torch.cat([parts[0] + parts[1], parts[2] + parts[3]]))
    return Explainer(ranks, one, 0, (), groups)


def test_the_wrong_group_of_a_collective_is_named_with_the_right_one() -> None:
    explainer = explain("dp")
    (cause,) = explainer.explain(20.0)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.proved, culprit.ranks) == ("group", True, (0, 1, 2, 3))
    assert (culprit.numbers, culprit.axes) == ((("dp", "tp"),), ("dp", "tp"))
    assert (culprit.repaired, culprit.code) == (("loss/total",), Cause.COLLECTIVES)


def test_a_part_that_a_collective_over_too_few_ranks_made_is_traced_to_it() -> None:
    """The sine takes a part over dp of the right sum, and a sum over dp before it would repair it, too."""
    parts = [make(*SHAPE, seed=seed) for seed in range(4)]
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    ranks = [
        make_rank(part, pair, tuple(parts[each] for each in pair))
        for part, pair in zip(parts, pairs, strict=True)
    ]
    explainer = Explainer(
        ranks, make_rank(torch.stack(parts).sum(0)), 0, (), {**GROUPS, "all": [[0, 1, 2, 3]]}
    )
    (cause,) = explainer.explain(20.0)
    assert (cause.repairs[0].kind, cause.repairs[0].numbers) == ("group", (("tp", "all"),))


def test_a_group_without_an_axis_is_named_by_its_ranks() -> None:
    (cause,) = explain("all").explain(20.0)
    assert cause.repairs[0].numbers == (("ranks 0, 1, 2, 3", "tp"),)


def test_no_group_is_blamed_if_no_axis_makes_the_result_right() -> None:
    causes = explain("dp", {"dp": GROUPS["dp"]}).explain(20.0)
    assert causes
    assert "group" not in [edit.kind for cause in causes for edit in cause.repairs]


@pytest.mark.parametrize(("widens", "axes"), [(False, ["each rank alone"]), (True, [])])
def test_a_sum_over_ranks_with_other_rows_needs_no_other_rank(widens: bool, axes: list[str]) -> None:
    parts = (make(*SHAPE), make(*SHAPE, seed=1))
    ranks = [make_rank(part, (0, 1), parts, half=rank) for rank, part in enumerate(parts)]
    alignment = Alignment(Joint(ranks), make_rank(torch.cat(parts)))
    edits = list(list_regroupings(alignment, {"dp": [[0, 1]]}, [(0, 2), (1, 2)], widens=widens))
    assert [each.numbers[0][1] for each in edits] == axes
    assert all(torch.equal(each.changes.values[1, 2], parts[1] * 2) for each in edits)


@pytest.mark.parametrize("missing", [0, 3])
def test_a_rank_without_the_call_cannot_take_part(missing: int) -> None:
    parts = make_parts()
    ranks = [make_rank(each, (0, 2) if rank % 2 == 0 else (1, 3), (each,)) for rank, each in enumerate(parts)]
    ranks[missing].ops[2:] = []
    alignment = Alignment(Joint(ranks), make_rank(parts[0] + parts[1]))
    other = 1 if missing == 0 else 2
    assert not [
        each
        for each in list_regroupings(alignment, {"tp": GROUPS["tp"]}, [(other, 2)])
        if "tp" in each.numbers[0]
    ]


def test_ranks_are_named_by_their_axis() -> None:
    assert [name_ranks(GROUPS, each) for each in ([2, 0], [0, 3])] == ["dp", "ranks 0, 3"]


def make_peaks() -> Explainer:
    """Return the search in programs where each rank subtracts its own maximum; one device takes that of both."""
    halves = [make(6, 4, seed=1), 2 * make(6, 4, seed=2)]
    ranks = [
        record_call(
            lambda x: (x - x.amax(-1)[:, None]).sin(), Region.box((6, 8), [range(6), columns]), x=half
        )
        for half, columns in zip(halves, (range(4), range(4, 8)), strict=True)
    ]
    one = record_call(lambda x: (-x.amax(-1)[:, None] + x).sin(), x=torch.cat(halves, 1))
    return Explainer(ranks, one, 0, (), {"tp": [[0, 1]]})


def test_a_value_that_each_rank_has_of_its_own_part_is_right_when_reduced() -> None:
    explainer = make_peaks()
    (cause,) = explainer.explain(20.0)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.proved, culprit.here.operator) == ("unreduced", True, "amax")
    assert (culprit.numbers, culprit.axes) == ((("maximum", "tp"),), ("tp",))
    assert (culprit.repaired, culprit.code) == (("loss/total",), Cause.MISSING_REDUCTION)


def test_values_that_are_equal_on_all_ranks_need_no_reduction() -> None:
    ranks = [record_call(lambda x: x.sin(), x=make(6, 4)) for _ in range(2)]
    alignment = Alignment(Joint(ranks), record_call(lambda x: x.cos(), x=make(6, 4)))
    (sine,) = [op for op in ranks[0].ops if op.short == "sin"]
    assert not list(list_reductions(alignment, {"tp": [[0, 1]]}, [(0, sine.number), (1, sine.number)]))


def test_a_rank_without_the_value_cannot_be_reduced() -> None:
    ranks = [record_call(lambda x: x.sin(), x=make(6, 4, seed=seed)) for seed in range(2)]
    alignment = Alignment(Joint(ranks), record_call(lambda x: x.cos(), x=make(6, 4)))
    (sine,) = [op for op in ranks[0].ops if op.short == "sin"]
    assert not list(list_reductions(alignment, {"tp": [[0, 1, 2]]}, [(0, sine.number)]))


def test_the_reduction_that_continues_an_operator_is_tried_first() -> None:
    ranks = [record_call(lambda x: x.amax(-1).sin(), x=make(6, 4, seed=seed)) for seed in range(2)]
    alignment = Alignment(Joint(ranks), record_call(lambda x: x.cos(), x=make(6, 4)))
    for name, first in (("amax", "maximum"), ("sin", "sum")):
        (op,) = [each for each in ranks[0].ops if each.short == name]
        edits = list_reductions(alignment, {"tp": [[0, 1]]}, [(0, op.number), (1, op.number)])
        assert next(edits).numbers == ((first, "tp"),)


@pytest.mark.parametrize(("is_right", "only_moves"), [(True, False), (False, False), (False, True)])
def test_a_line_that_runs_a_collective_and_makes_nothing_wrong_is_no_branch_to_look_at(
    is_right: bool, only_moves: bool
) -> None:
    parts = make_parts()[:2]
    ranks = [make_rank(part, (0, 1), tuple(parts)) for part in parts]
    site = Site(__file__, 1, "run")
    for program in ranks:
        for op in program.ops[2 if only_moves else 1 : 3]:
            op.sites = (site,)
        program.lines[0] = {(site.file, site.line)}
    alignment = Alignment(Joint(ranks), make_rank(parts[0] + parts[1] if is_right else make(*SHAPE, seed=9)))
    one = OneDevice(alignment.one, alignment.elements)
    lines = UserLines(alignment.joint, alignment.one)
    branches = Branches(Agreement(alignment, one), alignment, alignment.one, lines, ())
    block = ((site.file, site.line),)
    assert branches._only_communicates(0, {0}, block) is only_moves
    assert branches._makes_right((0, 3), block) is (is_right and not only_moves)
    assert not branches._makes_right((0, 1), block)  # it comes later


def test_a_collective_that_one_device_does_not_need_is_named_with_its_axis() -> None:
    wholes = (make(*SHAPE), make(*SHAPE, seed=1))
    ranks = [make_rank(whole, (0, 1), wholes, half=rank) for rank, whole in enumerate(wholes)]
    explainer = Explainer(ranks, make_rank(torch.cat(wholes)), 0, (), {"tp": [[0, 1]]})
    (cause,) = explainer.explain(60)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.here.operator, culprit.axes) == ("removed", "all_reduce", ("tp",))
    assert culprit.code is Cause.COLLECTIVES
    assert ("here", "communicates over tp") in list_culprit(culprit)


def test_a_group_that_no_input_fits_is_not_executed() -> None:
    """A list of two parts is not for three ranks, and a third of a tensor of two elements does not exist."""
    for kind, inputs in (
        ("reduce_scatter", [[make(2)]] * 3),
        ("all_reduce", [[make(2), make(2)], [make(2)]]),
    ):
        ops = [
            Op(0, f"collective.{kind}", ([Ref(n) for n in range(len(each))],), {"shapes": [(2,)]})
            for each in inputs
        ]
        programs = [
            Program(ops=[op], values=[Value(n, 0, (2,), "float64", each) for n, each in enumerate(given)])
            for op, given in zip(ops, inputs, strict=True)
        ]
        members = [(rank, 0) for rank, _ in enumerate(programs)]
        joint = Joint(programs)
        with pytest.raises(NotExecutable):
            meet_over(joint, members[-1] if kind == "reduce_scatter" else members[0], members, joint.data)
