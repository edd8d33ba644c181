"""Reductions that ranks lack, of counts behind a wrong operand, and the operations that computed a value."""

from __future__ import annotations

import pytest
import torch
from recordings import MARK, find_input, list_ops, make, record_call, result_of
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import skip_sums
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.culprits import Culprits
from moeverify.explain.edit import Edit
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Changes, Joint
from moeverify.explain.missing_sums import list_missing_sums, list_reduced, list_unreduced_terms
from moeverify.explain.program import GroupRef, Meeting, Program
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind

GROUPS = {"dp": [[0, 1]]}
X = make(6, 4)
TARGETS = [torch.tensor([1, -1, 3, 4, -1]), torch.tensor([0, -1, -1, 2, -1])]


def divide(x: Tensor, targets: Tensor) -> Tensor:
    return x.sin() / (targets >= 0).sum()


def explain(targets: list[Tensor], groups: dict[str, list[list[int]]]) -> Explainer:
    ranks = [record_call(divide, x=X, targets=each) for each in targets]
    return Explainer(ranks, record_call(divide, x=X, targets=torch.cat(TARGETS)), 0, (), groups)


def test_a_count_that_is_not_summed_over_ranks_is_named_with_the_axis() -> None:
    explainer = explain(TARGETS, GROUPS)
    (cause,) = explainer.explain(20.0)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.here.operator, culprit.axes) == ("unreduced", "sum", ("dp",))
    assert culprit.repaired == ("loss/total",)


def test_no_sum_is_named_that_does_not_give_the_right_count() -> None:
    explainer = explain([TARGETS[0], TARGETS[0]], GROUPS)
    assert "unreduced" not in [edit.kind for cause in explainer.explain(20.0) for edit in cause.repairs]


def test_a_mean_of_own_rows_is_no_part_of_the_mean_of_all() -> None:
    def normalize(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() / y.square().mean().sqrt()

    y = make(8, 4, seed=2)
    ranks = [record_call(normalize, x=X, y=part) for part in y.chunk(2)]
    explainer = Explainer(ranks, record_call(normalize, x=X, y=y), 0, (2.0, 0.5), GROUPS)
    (cause,) = explainer.explain(20.0)
    assert (cause.repairs[0].kind, cause.repairs[0].numbers) == ("unreduced", (("mean", "dp"),))


def test_a_mean_of_nearly_equal_numbers_is_reduced_where_it_is_made() -> None:
    """Its root is nearly a part of a sum, too, as of the first updates of Adam, which are 1 or -1."""

    def bound(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() / y.square().mean().sqrt().clamp(min=0.5)

    y = make(8, 4, seed=2).sign() * (1 + 1e-5 * make(8, 4, seed=3))
    ranks = [record_call(bound, x=X, y=part) for part in y.chunk(2)]
    explainer = Explainer(ranks, record_call(bound, x=X, y=y), 0, (2.0, 0.5), GROUPS)
    (cause,) = explainer.explain(20.0)
    assert (cause.repairs[0].kind, cause.repairs[0].numbers) == ("unreduced", (("mean", "dp"),))
    assert {explainer.joint.op(op).short for op in cause.ops} == {"mean"}


def test_a_value_without_counterpart_is_made_before_it_was_copied() -> None:
    program = record_call(lambda x: (x * 3.0).clone().view(4, 6).sin(), x=X)
    joint = Joint([program])
    (sine,) = list_ops(program, "sin")
    (product,) = list_ops(program, "mul")
    assert skip_sums(joint, joint.own_reads((0, sine.number))[0]) == (0, product.results[0])
    assert skip_sums(joint, find_input(program, "x")) == find_input(program, "x")


@pytest.mark.parametrize("is_reduced", [False, True])
def test_terms_of_a_norm_that_reach_it_without_a_sum_over_ranks_are_listed(is_reduced: bool) -> None:
    def measure(whole: Tensor, cut: Tensor) -> Tensor:
        total = whole.square().sum()
        return (total + cut.square().sum()).sqrt()

    whole, cut = make(8, 4, seed=1), make(8, 4, seed=2)
    ranks = [record_call(measure, whole=whole, cut=half) for half in cut.chunk(2)]
    unknown = [(rank, op.number) for rank, program in enumerate(ranks) for op in program.ops]
    if is_reduced:  # the last operator stands for the collective
        for program in ranks:
            program.ops[-1].meeting = Meeting(GroupRef("tp", (0, 1)), 0)
            program.ops[-1].name = "collective.all_reduce"
    alignment = Alignment(Joint(ranks), record_call(measure, whole=whole, cut=cut))
    one = OneDevice(alignment.one, alignment.elements)
    edits = list(list_unreduced_terms(alignment, one, {"tp": [[0, 1]], "dp": [[0], [1]]}, unknown))
    assert len(edits) == (not is_reduced)
    for edit in edits:
        assert (edit.kind, edit.numbers) == ("unreduced", (("sum", "tp"),))
        assert len(edit.ops) == 2  # one of two terms, on two ranks
        assert all(torch.isclose(each, cut.square().sum()) for each in edit.changes.values.values())


def test_a_maximum_of_own_columns_is_reduced_by_a_maximum() -> None:
    """The maximum of all columns repairs it, too, as another operand, which no rank has."""

    def shift(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() - y.amax(-1)).exp()

    y = make(6, 8, seed=2)
    ranks = [record_call(shift, x=make(6), y=part) for part in y.chunk(2, dim=-1)]
    explainer = Explainer(ranks, record_call(shift, x=make(6), y=y), 0, (), GROUPS)
    (cause,) = explainer.explain(20.0)
    assert (cause.repairs[0].kind, cause.repairs[0].numbers) == ("unreduced", (("maximum", "dp"),))
    assert {explainer.joint.op(op).short for op in cause.ops} == {"amax"}


def test_a_lookup_in_own_rows_is_reduced_before_a_rank_takes_its_places() -> None:
    """Elements that another rank owns are zero in it, and each element that it has is right."""

    def look_up(rows: Tensor, ids: Tensor, rank: int, size: int) -> Tensor:
        mine = (ids >= 0) & (ids < len(rows))
        found = rows[ids.clamp(0, len(rows) - 1)] * mine[:, None]
        part = len(found) // size
        return (found[rank * part : (rank + 1) * part] * 2.0).cos()

    def record(rows: Tensor, ids: Tensor, rank: int = 0, size: int = 1) -> Program:
        part = 8 // size
        region = Region.box((8, 4), [range(rank * part, (rank + 1) * part), range(4)])
        return record_call(lambda rows, ids: look_up(rows, ids, rank, size), region, rows=rows, ids=ids)

    table, ids = make(12, 4), torch.tensor([0, 7, 5, 6, 11, 3, 6, 2])
    ranks = [record(rows, ids - 6 * rank, rank, 2) for rank, rows in enumerate(table.chunk(2))]
    one = record(table, ids)
    joint = Joint(ranks)
    alignment = Alignment(joint, one)
    taken = [(rank, result_of(program, "slice")) for rank, program in enumerate(ranks)]
    made = [(rank, list_ops(program, "mul")[1].number) for rank, program in enumerate(ranks)]
    assert [alignment.is_right(at) for op in made for at in joint.results(op)] == [False, False]
    right = dict(zip(taken, table[ids].chunk(2), strict=True))
    edit = Edit("operand", tuple(made), Changes(values=right))
    edits = list(list_missing_sums(alignment, GROUPS, edit, joint.execute(Changes())))
    assert [(each.kind, each.numbers) for each in edits] == [("unreduced", (("sum", "dp"),))]
    assert {op[1] for op in edits[0].ops} == {list_ops(ranks[0], "mul")[0].number}


def test_parts_that_a_step_takes_are_gradients_with_names() -> None:
    """The square reads the gradient of `w` before a clip multiplies it."""

    def train(x: Tensor, w: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((x * w).sum(), w)
        norm = gradient.square().sum().sqrt()
        return gradient * 0.5 / (norm + 1.0)

    program = record_call(train, x=make(6, 4), w=make(4).requires_grad_())
    program.marks[0, Kind.GRADIENT, "w"] = program.marks[MARK]
    (square,) = [op for op in list_ops(program, "pow") if op.phase != "backward"]
    assert list(list_reduced(Joint([program]), [(0, square.number)])) == ["gradient/w"]
