"""Replay of programs with changes: the code's results, and a report of operations that cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recordings import find_input, find_result, list_ops, make, record_call, result_of
from torch import Tensor

from moeverify.explain.joint import Changes, Joint, is_same
from moeverify.explain.operators import NotExecutable
from moeverify.explain.program import GroupRef, Meeting, Op, Program, Ref, Value


def compute(a: Tensor, b: Tensor, factor: float = 2.0) -> Tensor:
    """Return a result of in-place writes, through a view and to the whole tensor."""
    scaled = a * factor
    scaled[0].add_(b[0])
    wide = torch.cat([scaled, b])
    wide.tanh_()
    return (wide.t() @ wide).sum(0)


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    return {"a": make(3, 4), "b": make(3, 4, seed=1)}


def test_a_changed_operator_changes_all_that_follows(inputs: dict[str, Tensor]) -> None:
    program = record_call(compute, **inputs)
    (op,) = list_ops(program, "mul")
    source = find_input(program, "a")[1]
    done = Joint([program]).execute(Changes(ops={(0, op.number): lambda lookup: [lookup(source) * 3]}))
    result = done.data(find_result(program))
    assert result is not None
    assert torch.allclose(result, compute(**inputs, factor=3.0), rtol=1e-14)
    assert done.tainted == set()


def test_a_changed_value_changes_all_that_follows(inputs: dict[str, Tensor]) -> None:
    program = record_call(compute, **inputs)
    other = make(3, 4, seed=2)
    done = Joint([program]).execute(Changes(values={find_input(program, "b"): other}))
    result = done.data(find_result(program))
    assert result is not None
    assert torch.allclose(result, compute(inputs["a"], other), rtol=1e-14)


def test_without_changes_nothing_is_another(inputs: dict[str, Tensor]) -> None:
    program = record_call(compute, **inputs)
    joint = Joint([program])
    assert joint.execute(Changes()).changed() == {}
    (op,) = list_ops(program, "mul")
    source = find_input(program, "a")[1]
    same = joint.execute(Changes(ops={(0, op.number): lambda lookup: [lookup(source) + lookup(source)]}))
    assert same.changed() == {}, "what is the same is not executed further"


def test_changes_add_to_those_before(inputs: dict[str, Tensor]) -> None:
    program = record_call(compute, **inputs)
    joint, others = Joint([program]), {"a": make(3, 4, seed=2), "b": make(3, 4, seed=3)}
    done = None
    for name, data in others.items():
        done = joint.execute(Changes(values={find_input(program, name): data}), None, done)
    assert done is not None
    result = done.data(find_result(program))
    assert result is not None
    assert torch.allclose(result, compute(others["a"], others["b"]), rtol=1e-14)


def test_only_what_is_wanted_is_executed(inputs: dict[str, Tensor]) -> None:
    program = record_call(compute, **inputs)
    wanted = (0, result_of(program, "mul"))
    done = Joint([program]).execute(Changes(values={find_input(program, "a"): make(3, 4, seed=2)}), [wanted])
    assert set(done.changed()) == {find_input(program, "a"), wanted}


def test_random_numbers_stay_as_they_were_drawn() -> None:
    def run(a: Tensor) -> Tensor:
        return a * torch.rand_like(a)

    program = record_call(run, a=make(3))
    drawn = program.values[result_of(program, "rand_like")].data
    other = make(3, seed=1)
    done = Joint([program]).execute(Changes(values={find_input(program, "a"): other}))
    result = done.data(find_result(program))
    assert drawn is not None
    assert result is not None
    assert torch.equal(result, other * drawn)
    assert done.tainted == set()


def _raise(lookup: Callable[[int], Tensor]) -> list[Tensor]:
    raise NotExecutable("planted")


def test_what_cannot_be_executed_taints_what_follows(inputs: dict[str, Tensor]) -> None:
    program = record_call(compute, **inputs)
    joint, (op,) = Joint([program]), list_ops(program, "mul")
    done = joint.execute(Changes(ops={(0, op.number): _raise}))
    assert {(0, op.results[0]), find_result(program)} <= done.tainted
    assert find_input(program, "b") not in done.tainted
    known = joint.execute(Changes(values={find_result(program): make(4)}), None, done)
    assert find_result(program) not in known.tainted, "a value that is given is known"


def test_operands_of_another_size_taint_the_result(inputs: dict[str, Tensor]) -> None:
    program = record_call(compute, **inputs)
    done = Joint([program]).execute(Changes(values={find_input(program, "b"): make(3, 5)}))
    assert find_result(program) in done.tainted


def test_a_number_that_was_read_in_python_taints_what_it_is_given_to() -> None:
    def run(a: Tensor, b: Tensor) -> Tensor:
        return b * a.sum().item()

    program = record_call(run, a=make(3), b=make(3, seed=1))
    done = Joint([program]).execute(Changes(values={find_input(program, "a"): make(3, seed=2)}))
    assert find_result(program) in done.tainted


def test_whole_numbers_that_change_are_other_choices() -> None:
    def run(a: Tensor) -> Tensor:
        return a[a.argsort()]

    a = make(5)
    program = record_call(run, a=a)
    joint, at = Joint([program]), find_input(program, "a")
    assert joint.execute(Changes(values={at: -a})).has_other_choices()
    assert not joint.execute(Changes(values={at: a * 2})).has_other_choices()


def make_rank(rank: int, *, reduction: str = "sum") -> Program:
    """Return a program that doubles a number and reduces it over two ranks."""
    number = torch.tensor([float(rank + 1)], dtype=torch.float64)
    meeting = Meeting(GroupRef("g", (0, 1)), 1)
    options = {"reduction": reduction, "shapes": [(1,)]}
    return Program(
        ops=[
            Op(0, "memory.leaf", ([],), {}, (0,)),
            Op(1, "aten.mul.Tensor", (Ref(0), 2.0), {}, (1,), step=0),
            Op(2, "collective.all_reduce", ([Ref(1)],), options, (2,), step=0, meeting=meeting),
        ],
        values=[
            Value(0, 0, (1,), "float64", number, "x"),
            Value(1, 1, (1,), "float64", number * 2),
            Value(2, 2, (1,), "float64", torch.tensor([6.0], dtype=torch.float64)),
        ],
    )


def test_a_collective_brings_a_change_to_the_other_ranks() -> None:
    joint = Joint([make_rank(0), make_rank(1)])
    done = joint.execute(Changes(values={(1, 0): torch.tensor([5.0], dtype=torch.float64)}))
    assert [done.data((rank, 2)) for rank in (0, 1)] == [12.0, 12.0]
    assert (0, 1) not in done.changed()
    assert joint.members((0, 2)) == ((0, 2), (1, 2))
    assert joint.place((1, 1)) < joint.place((0, 2)), "a collective comes after what all of its ranks bring"


def test_a_collective_that_a_rank_did_not_issue_cannot_be_executed() -> None:
    alone = make_rank(1)
    alone.ops.pop()
    joint = Joint([make_rank(0), alone])
    done = joint.execute(Changes(values={(0, 0): torch.tensor([5.0], dtype=torch.float64)}))
    assert done.tainted == {(0, 2)}


@pytest.mark.parametrize(("reduction", "result"), [("avg", 6.0), ("max", 10.0), ("product", 20.0)])
def test_a_reduction_is_executed_as_it_was_asked_for(reduction: str, result: float) -> None:
    joint = Joint([make_rank(rank, reduction=reduction) for rank in (0, 1)])
    done = joint.execute(Changes(values={(1, 0): torch.tensor([5.0], dtype=torch.float64)}))
    assert float(done.data((0, 2)) or 0) == result


@pytest.mark.parametrize("fill", [-1e30, torch.finfo(torch.float64).min, -torch.inf])
def test_what_a_mask_has_filled_in_hides_no_change(fill: float) -> None:
    scores, mask = make(4, 6), torch.ones(4, 6, dtype=torch.bool).triu(1)
    filled = scores.masked_fill(mask, fill)
    assert is_same(filled * 1.0, filled)
    assert not is_same((scores * 1.4).masked_fill(mask, fill), filled)
