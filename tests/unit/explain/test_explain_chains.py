"""Parts of sums that a collective adds up later, collectives without use, and chains of edits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recordings import list_ops, make, record_call
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import list_ancestors, list_reduced_modules
from moeverify.explain.edit import Edit
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Changes, Joint
from moeverify.explain.program import GroupRef, Meeting, Op, Program, Ref, Site, Value
from moeverify.explain.shorten import Shortener
from moeverify.explain.suspects import Target, list_reached
from moeverify.explain.upstream import Upstream
from moeverify.results.checks import Kind


def make_program(x: Tensor, total: Tensor | None, *, is_used: bool = True) -> Program:
    """Return a program that doubles numbers in a module and, with a total, reduces them over two ranks."""
    meeting = Meeting(GroupRef("g", (0, 1)), 1)
    options = {"reduction": "sum", "shapes": [tuple(x.shape)]}
    ops = [
        Op(0, "memory.leaf", ([],), {}, (0,)),
        Op(1, "aten.mul.Tensor", (Ref(0), 2.0), {}, (1,), step=0, module="block.out"),
    ]
    values = [Value(0, 0, tuple(x.shape), "float64", x, "x"), Value(1, 1, tuple(x.shape), "float64", x * 2)]
    if total is not None:
        ops.append(Op(2, "collective.all_reduce", ([Ref(1)],), options, (2,), step=0, meeting=meeting))
        ops.append(Op(3, "aten.exp.default", (Ref(2 if is_used else 1),), {}, (3,), step=0))
        values.append(Value(2, 2, tuple(x.shape), "float64", total))
        values.append(Value(3, 3, tuple(x.shape), "float64", (total if is_used else x * 2).exp()))
    return Program(ops=ops, values=values)


def renumber(program: Program) -> Program:
    """Return a program with numbers of operators in order; the collective reduces the value before it."""
    for number, op in enumerate(program.ops):
        op.number = number
        for result in op.results:
            program.values[result].op = number
        if op.meeting is not None:
            op.args = ([Ref(program.ops[number - 1].results[0])],)
    return program


def test_what_a_rank_sends_has_no_result_here() -> None:
    program = make_program(make(6, 4), None)
    meeting = Meeting(GroupRef("g", (0, 1)), 1)
    program.ops.append(Op(2, "collective.send", (Ref(1),), {}, (), step=0, meeting=meeting))
    assert not list_reduced_modules(Alignment(Joint([program]), make_program(make(6, 4), None)))


@pytest.mark.parametrize(
    ("error", "is_used", "modules"),
    [(0.0, True, {"block.out"}), (0.5, True, set()), (0.0, False, set())],
)
def test_a_module_whose_parts_are_added_up_is_reduced(error: float, is_used: bool, modules: set[str]) -> None:
    whole, part = make(6, 4), make(6, 4, seed=1)
    ranks = [make_program(each, whole * 2 + error, is_used=is_used) for each in (part, whole - part)]
    alignment = Alignment(Joint(ranks), make_program(whole, None))
    assert list_reduced_modules(alignment) == modules


def test_a_module_is_reduced_if_its_parts_are_added_to_others_first() -> None:
    whole, part = make(6, 4), make(6, 4, seed=1)
    ranks = []
    for each in (part, whole - part):
        program = make_program(each, whole * 6)
        doubled, reduced = program.ops[1:3]
        scaled = Op(4, "aten.mul.Tensor", (Ref(1), 3.0), {}, (4,), step=0, module="block")
        program.values[4:] = [Value(4, 4, (6, 4), "float64", each * 6)]
        program.ops = [program.ops[0], doubled, scaled, reduced, program.ops[3]]
        ranks.append(renumber(program))
    one = make_program(whole, None)
    one.ops.append(Op(2, "aten.mul.Tensor", (Ref(1), 3.0), {}, (2,), step=0, module="block"))
    one.values.append(Value(2, 2, (6, 4), "float64", whole * 6))
    assert list_reduced_modules(Alignment(Joint(ranks), one)) == {"block", "block.out"}


def test_the_operands_of_a_collective_are_those_of_the_own_rank() -> None:
    whole, part = make(6, 4), make(6, 4, seed=1)
    joint = Joint([make_program(each, whole * 2) for each in (part, whole - part)])
    assert len(joint.reads((1, 2))) == 2
    assert list(list_ancestors(joint, (1, 2), 0)) == [(1, 1)]


@pytest.mark.parametrize("module", ["", "other"])
def test_an_operand_of_another_module_is_needless_before_a_later_right_value(module: str) -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        first = x.sin()
        second = first.flip(0).exp() if on_ranks else first.exp()
        return second.cos()

    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(6, 4)) for on in (1, 0))
    explainer = Explainer([ranks], one, 0, ())
    (target,), state = explainer.wrong, explainer.joint.execute(Changes())
    ((exp,), (cos,)), (other,) = (list_ops(ranks, each) for each in ("exp", "cos")), list_ops(one, "exp")
    taken, made = (0, next(exp.reads())), (0, exp.results[0])
    others = {(0, exp.number): replace(other, module=module)}
    first = Edit("operand", ((0, exp.number),), Changes(values={taken: make(6, 4, seed=1)}), others)
    repair = Edit("operand", ((0, cos.number),), Changes(values={made: make(6, 4).sin().exp()}))
    chain = [OperatorCause([edit.ops[0]], [edit], [target]) for edit in (first, repair)]
    done = explainer.joint.execute(repair.changes, None, state)
    assert (
        Shortener(explainer.joint, explainer.proof, explainer.wrong).shorten(chain, done, target, (), state)[
            0
        ]
        == chain[bool(module) :]
    )


@pytest.mark.parametrize("is_used", [True, False])
def test_a_collective_whose_result_nothing_uses_is_named(is_used: bool) -> None:
    whole, part = make(6, 4), make(6, 4, seed=1)
    ranks = [make_program(each, whole * 2, is_used=is_used) for each in (part, whole - part)]
    site = Site(__file__, 1, "run")
    for program in ranks:
        program.ops[2].sites = (site,)
    explainer = Explainer(ranks, make_program(whole, None), 0, ())
    upstream = Upstream(explainer)
    found = list(upstream._list_unused(OperatorCause([(0, 3)], [], [])))
    assert [each.kind for each in found] == ([] if is_used else ["unused"])


@pytest.mark.parametrize("adds", [True, False])
def test_a_copy_over_a_result_that_nothing_has_read_is_named(*, adds: bool) -> None:
    def accumulate(x: Tensor, is_one: int) -> Tensor:
        total = x.new_zeros(4)
        for part in x.chunk(2) if not is_one else [x]:
            total.copy_(total + part.sum(0) if adds else part.sum(0))
        return total.sin()

    ranks, one = (record_call(lambda x, on=on: accumulate(x, on), x=make(6, 4)) for on in (0, 1))
    upstream = Upstream(Explainer([ranks], one, 0, ()))
    (sine,) = list_ops(ranks, "sin")
    found = list(upstream._list_overwritten(OperatorCause([(0, sine.number)], [], [])))
    assert [each.kind for each in found] == ([] if adds else ["overwrites"])


@pytest.mark.parametrize("is_half", [True, False])
def test_a_collective_that_adds_equal_values_to_a_wrong_multiple_is_named(*, is_half: bool) -> None:
    whole = make(6, 4)
    ranks = [make_program(whole / 2 if is_half else whole, whole * (2 if is_half else 4)) for _ in range(2)]
    for program in ranks:
        program.ops[2].sites = (Site(__file__, 1, "run"),)
    explainer = Explainer(ranks, make_program(whole, None), 0, (2.0, 0.5))
    last = len(ranks[0].ops) - 1
    target = Target((0, Kind.GRADIENT, "w"), {0: (0, ranks[0].ops[last].results[0])}, {}, {})
    found = list(Upstream(explainer)._list_repeated(OperatorCause([(0, last)], [], [target])))
    assert [each.kind for each in found] == ([] if is_half else ["repeated"])


def test_the_backward_pass_reaches_parameters_of_which_it_computes_a_gradient() -> None:
    def train(w: Tensor, v: Tensor, u: Tensor) -> Tensor:
        loss = (w * w).sum() + (v * 0.0 * v).sum()
        loss.backward()
        return loss.detach() + u.sum()

    inputs = {name: make(4).requires_grad_() for name in "wvu"}
    assert list_reached([record_call(train, **inputs)], 0) == {"w"}
