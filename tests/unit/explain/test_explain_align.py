"""Two ranks without collectives: their values that are values of one device, and the matching places."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from recordings import MARK, data_of, find_input, find_result, list_ops, make, record_call, result_of
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Changes, Joint
from moeverify.explain.program import Program
from moeverify.parallel.regions.region import Region

ROWS = (range(3), range(3, 6))


def transform(x: Tensor, w: Tensor, factor: float = 0.7, limit: float = 0.5) -> Tensor:
    hidden = torch.tanh(x @ w)
    scaled = hidden * factor
    return scaled.exp() + hidden.clamp(max=limit)


def record_rank(rank: int, factor: float = 0.7, limit: float = 0.5) -> Program:
    """Return the recording of a rank with half of the rows."""
    region = Region.box((6, 5), [ROWS[rank], range(5)])
    x, w = make(6, 4)[list(ROWS[rank])], make(4, 5, seed=1)
    program = record_call(lambda x, w: transform(x, w, factor, limit), region, x=x, w=w)
    program.shares = [(ROWS[rank], (0,))]
    return program


@pytest.fixture
def one() -> Program:
    program = record_call(transform, x=make(6, 4), w=make(4, 5, seed=1))
    program.shares = [(range(6), (0,))]
    return program


def test_all_that_ranks_compute_of_half_of_the_rows_is_known(one: Program) -> None:
    programs = [record_rank(0), record_rank(1)]
    alignment = Alignment(Joint(programs), one)
    for rank, program in enumerate(programs):
        for name in ("mm", "tanh", "mul", "exp"):
            known = alignment.find((rank, result_of(program, name)))
            assert known is not None
            assert known.ids is not None
            assert (known.scale, known.over) == (1.0, ())
            whole = alignment.elements.ids[result_of(one, name)]
            assert whole is not None
            assert torch.equal(known.ids, whole[list(ROWS[rank])])


def test_what_follows_from_another_number_is_not_known(one: Program) -> None:
    programs = [record_rank(0), record_rank(1, factor=0.9)]
    alignment = Alignment(Joint(programs), one)
    assert alignment.is_right((1, result_of(programs[1], "tanh")))
    assert alignment.is_wrong(find_result(programs[1], 1))
    assert alignment.is_right(find_result(programs[0], 0))


def test_a_change_that_repairs_makes_values_known(one: Program) -> None:
    programs = [record_rank(0), record_rank(1, factor=0.9)]
    joint = Joint(programs)
    alignment = Alignment(joint, one)
    product, at = list_ops(programs[1], "mul")[0], find_result(programs[1], 1)
    assert alignment.is_wrong(at)
    hidden = result_of(programs[1], "tanh")
    done = joint.execute(Changes(ops={(1, product.number): lambda lookup: [lookup(hidden) * 0.7]}))
    assert alignment.under(done).is_right(at)
    assert alignment.is_wrong(at)


def test_a_multiple_is_known_with_its_factor_and_may_be_wrong(one: Program) -> None:
    programs = [record_rank(0), record_rank(1, factor=1.4)]
    alignment = Alignment(Joint(programs), one)
    at = (1, result_of(programs[1], "mul"))
    known = alignment.find(at)
    assert known is not None
    roots = {} if known.ids is None else alignment.elements.roots(known.ids)
    right = data_of(one, next(iter(roots)))
    assert math.isclose(float(data_of(programs[1], at[1])[0, 0] / right[3, 0]), known.scale, rel_tol=1e-9)
    assert alignment.is_right(at)
    assert not alignment.without_scale(known.scale).is_right(at)


def contract(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@pytest.fixture
def parts() -> list[Program]:
    """Return two ranks with half of each sum's terms."""
    x, w = make(6, 4), make(4, 5, seed=1)
    halves = (slice(0, 2), slice(2, 4))
    return [record_call(contract, x=x[:, half], w=w[half]) for half in halves]


def test_parts_of_a_sum_are_known_with_all_that_is_summed(parts: list[Program]) -> None:
    one = record_call(contract, x=make(6, 4), w=make(4, 5, seed=1))
    alignment = Alignment(Joint(parts), one)
    ats = tuple(find_result(program, rank) for rank, program in enumerate(parts))
    for at in ats:
        known = alignment.find(at)
        assert known is not None
        assert known.over == ats
        assert known.ids is not None
        assert torch.allclose(alignment.elements.pick(known.ids), data_of(one, find_result(one)[1]))


def test_a_part_that_ranks_of_another_axis_have_too_is_no_multiple() -> None:
    x, w = make(6, 4), make(4, 5, seed=1)
    halves = (slice(0, 2), slice(2, 4))
    ranks = [
        record_call(contract, x=x[:, half], w=w[half])
        for half in (halves[0], halves[0], halves[1], halves[1])
    ]
    alignment = Alignment(Joint(ranks), record_call(contract, x=x, w=w), (2.0,))
    alignment._groups = [(0, 1, 2, 3), (0, 2), (1, 3)]
    known = alignment.find(find_result(ranks[0]))
    assert known is not None
    assert (known.scale, [rank for rank, _ in known.over]) == (1.0, [0, 2])


def contract_each(x: Tensor, w: Tensor) -> Tensor:
    """Return the joined results of one contraction per expert: (6, 5)."""
    return torch.cat([rows @ w[expert] for expert, rows in enumerate(x)])


def record_experts(terms: slice = slice(None), scale: float = 1.0) -> Program:
    """Return a recording of six experts with a slice of each sum's terms; the last is scaled."""
    x, w = make(6, 1, 4)[..., terms].clone(), make(6, 4, 5, seed=1)[:, terms].clone()
    w[-1] *= scale
    return record_call(contract_each, x=x, w=w)


@pytest.mark.parametrize(("scale", "is_known"), [(1.0, True), (1.5, False)])
def test_joined_parts_of_many_sums_are_known_unless_one_is_wrong(scale: float, is_known: bool) -> None:
    parts = [record_experts(slice(0, 2)), record_experts(slice(2, 4), scale)]
    alignment = Alignment(Joint(parts), record_experts())
    ats = tuple((rank, result_of(program, "cat")) for rank, program in enumerate(parts))
    found = [alignment.find(at) for at in ats]
    assert [each is not None and each.over == ats for each in found] == [is_known, is_known]


def test_where_a_part_is_wrong_the_sum_is_none(parts: list[Program]) -> None:
    one = record_call(contract, x=make(6, 4), w=make(4, 5, seed=1))
    joint = Joint(parts)
    done = joint.execute(Changes(values={find_input(parts[1], "w", 1): make(2, 5, seed=9)}))
    before = Alignment(joint, one)
    assert before.find(find_result(parts[0])) is not None
    alignment = before.under(done)
    assert [alignment.find(find_result(program, rank)) for rank, program in enumerate(parts)] == [None, None]


@pytest.mark.parametrize(
    ("wrong", "expression"),
    [({"factor": 0.9}, "hidden * factor"), ({"limit": 0.3}, "hidden.clamp(max=limit)")],
)
def test_a_wrong_number_is_found_on_its_rank_and_proved(
    one: Program, wrong: dict[str, float], expression: str
) -> None:
    explainer = Explainer([record_rank(0), record_rank(1, **wrong)], one, 0, [])
    heard: list[tuple[int, list[OperatorCause]]] = []
    (cause,) = explainer.explain(30.0, on_place=lambda places: heard.append((explainer.tried, places)))
    ((tried, (place,)),) = heard
    assert (tried, place.repairs) == (0, [])
    assert set(place.ops) <= set(cause.ops)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.proved, culprit.ranks) == (True, (1,))
    assert culprit.here.line is not None
    assert culprit.here.line.file.endswith("test_explain_align.py")
    assert culprit.here.line.expression == expression
    if "limit" in wrong:
        assert (culprit.mechanism, culprit.numbers) == ("number", (("0.3", "0.5"),))
    else:  # by its number, or by the factor that it makes
        assert culprit.mechanism in ("number", "scale")
    assert culprit.repaired == ("/".join(MARK[1:]),)
    assert explainer.is_done


def test_ranks_that_are_right_have_no_cause(one: Program) -> None:
    explainer = Explainer([record_rank(0), record_rank(1)], one, 0, [])
    assert explainer.wrong == []
    assert explainer.explain(30.0) == []
    assert explainer.is_done


@pytest.mark.parametrize("is_viewed", [False, True])
def test_numbers_that_a_freed_tensor_left_are_no_evidence(*, is_viewed: bool) -> None:
    """Uninitialized memory of a rank has rows of one device, in another order than the rows written there."""

    def put(x: Tensor, w: Tensor) -> Tensor:
        made = x @ w
        memory = torch.empty_like(made)
        memory = memory.view(6, 5) if is_viewed else memory
        return memory.index_copy(0, torch.arange(6).flip(0), made)

    x, w = make(6, 4), make(4, 5, seed=1)
    one, program = record_call(put, x=x, w=w), record_call(put, x=x, w=w)
    for name in ("empty_like", "view")[: 1 + is_viewed]:
        data_of(program, result_of(program, name)).copy_((x @ w)[[1, 2, 3, 4, 5, 0]])
        data_of(one, result_of(one, name)).fill_(0.5)
    alignment = Alignment(Joint([program]), one)
    memory, written = (0, result_of(program, "empty_like")), (0, result_of(program, "index_copy"))
    assert alignment.find(memory) is None
    assert not alignment.is_wrong(memory)
    known = alignment.find(written)
    assert known is not None
    assert known.ids is not None
    assert alignment.elements.root(int(known.ids[0, 0])) == result_of(one, "mm")
    if is_viewed:
        assert not alignment.is_wrong((0, result_of(program, "view")))


def test_parts_of_micro_batches_are_told_apart_by_layer_where_layers_run_one_line() -> None:
    def compute(x: Tensor, w: Tensor, rows: int = 6) -> Tensor:
        total = torch.zeros(4, 5, dtype=x.dtype)
        for part in x.split(rows):
            for weight in w:
                total = total + part.T @ (part @ weight).tanh()
        return total

    inputs = {"x": make(6, 4), "w": make(2, 4, 5, seed=1)}
    one = record_call(compute, **inputs)
    rank = record_call(partial(compute, rows=3), **inputs)
    alignment = Alignment(Joint([rank]), one)
    sums = [op.results[0] for op in list_ops(rank, "mm")[1::2]]
    assert len(sums) == 4
    for place, number in enumerate(sums):
        known = alignment.find((0, number))
        assert known is not None
        assert known.over == tuple((0, each) for each in sums[place % 2 :: 2])


def test_values_that_depend_on_each_other_are_no_parts_of_a_sum() -> None:
    """A gradient that is accumulated over several uses is no part of a sum over micro-batches."""

    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def run(x: Tensor, y: Tensor) -> Tensor:
        return add(add(x, y), y).sin()

    ranks = record_call(run, x=make(6, 4), y=make(6, 4, seed=1))
    one = record_call(lambda x, y: (2 * x + 3 * y).sin(), x=make(6, 4), y=make(6, 4, seed=1))
    alignment = Alignment(Joint([ranks]), one)
    first, last = [(0, op.results[0]) for op in list_ops(ranks, "add")]
    assert (alignment.find(first), alignment.find(last)) == (None, None)
