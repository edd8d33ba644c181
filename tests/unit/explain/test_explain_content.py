"""Elements of one device are found by value, in any part, order, padding or multiple."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recordings import data_of, list_ops, make, record_call, result_of
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.content import Elements, fingerprint, is_move, says_something
from moeverify.explain.joint import Joint
from moeverify.explain.program import Program


def project(w: Tensor, u: Tensor) -> Tensor:
    return (w @ u).exp()


@pytest.fixture
def one() -> Program:
    return record_call(project, w=make(8, 6), u=make(6, 4, seed=1))


def prefer(root: int) -> object:
    return 0


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda w: w,
    "rows": lambda w: w[2:5],
    "columns": lambda w: w[:, 3:],
    "a block": lambda w: w[4:, 2:4],
    "other order": lambda w: w[torch.tensor([5, 0, 7, 2])],
    "transposed": lambda w: w.t(),
    "another shape": lambda w: w.reshape(4, 2, 6),
    "rows twice": lambda w: w[torch.tensor([1, 1, 3])],
    "rounded": lambda w: w * (1 + 1e-14),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_consists_of_the_elements_at_its_places(one: Program, name: str) -> None:
    elements, w = Elements(one), data_of(one, 0)
    ids = elements.find(PARTS[name](w), prefer)
    assert ids is not None
    # Identities of the first value of a program are places, from 1 on.
    assert torch.equal(ids, PARTS[name](torch.arange(1.0, 49.0).reshape(8, 6).double()).round().long())
    assert elements.roots(ids) == [0]
    assert torch.equal(elements.pick(ids), PARTS[name](w)) or name == "rounded"


def test_padding_has_no_identity(one: Program) -> None:
    w = data_of(one, 0)
    ids = Elements(one).find(torch.cat([w[6:], torch.zeros(2, 6)]), prefer)
    assert ids is not None
    assert torch.equal(ids, torch.cat([torch.arange(37, 49).reshape(2, 6), torch.zeros(2, 6).long()]))


def test_an_infinite_element_equals_only_itself(one: Program) -> None:
    masked = data_of(one, 0).clone()
    masked[2, 1] = -math.inf
    assert Elements(one).find(masked, prefer) is None
    elements = Elements(record_call(project, w=masked, u=make(6, 4, seed=1)))
    found = elements.find(masked, prefer)
    assert found is not None
    assert torch.equal(elements.pick(found), masked)


def test_two_tensors_may_be_one(one: Program) -> None:
    elements, w, u = Elements(one), data_of(one, 0), data_of(one, 1)
    together = torch.cat([w[:2].reshape(-1), u.reshape(-1)])
    ids = elements.find(together, prefer)
    assert ids is not None
    assert elements.roots(ids) == [1, 0], "that of most elements comes first"
    assert torch.equal(elements.pick(ids), together)


def test_what_is_nowhere_is_not_found(one: Program) -> None:
    elements, w = Elements(one), data_of(one, 0)
    other = w.clone()
    other[3, 3] += 1e-6
    for data in (make(8, 6, seed=5), w * 2, other, torch.cat([w, make(1, 6, seed=5)])):
        assert elements.find(data, prefer) is None


@pytest.mark.parametrize("factor", [3.0, -0.5, 1 / 7])
def test_the_factor_of_a_multiple_is_found(one: Program, factor: float) -> None:
    elements, w = Elements(one), data_of(one, 0)
    assert elements.find_factor(w[1:4] * factor, prefer) == pytest.approx(factor, rel=1e-12)


def test_the_factor_is_found_among_many_tensors_of_one_width() -> None:
    """Tensors of one width are indexed together, up to a number of elements."""
    inputs = {f"x{number}": make(8 + number, 6, seed=number) for number in range(5)}
    inputs |= {"large": make(10_000, 6, seed=8), "as large": make(9_000, 6, seed=9)}
    inputs |= {"narrow": make(7, 3, seed=10), "single": make(9, 1, seed=11)}
    elements = Elements(record_call(lambda **given: given["large"].exp(), **inputs))
    for name, x in inputs.items():
        found = elements.find_factor(x[2:7] * 3.0, prefer)
        assert found == (None if name == "single" else pytest.approx(3.0, rel=1e-12)), name


def test_rows_of_different_factors_are_no_multiple(one: Program) -> None:
    elements, w = Elements(one), data_of(one, 0)
    assert elements.find_factor(w * torch.arange(1, 9)[:, None], prefer) is None
    assert elements.find_factor(make(8, 6, seed=5), prefer) is None


def test_moved_elements_keep_their_identity() -> None:
    def run(w: Tensor) -> Tensor:
        doubled = w * 2
        return torch.cat([doubled[2:], doubled[:2]]).t().contiguous().exp()

    program = record_call(run, w=make(4, 3))
    elements = Elements(program)
    moved, doubled = elements.ids[result_of(program, "clone")], elements.ids[result_of(program, "mul")]
    assert moved is not None
    assert doubled is not None
    assert torch.equal(moved, torch.cat([doubled[2:], doubled[:2]]).t())
    assert elements.sources[result_of(program, "clone")] == {result_of(program, "mul")}
    assert elements.root(int(moved[0, 0])) == result_of(program, "mul")


def test_a_preferred_tensor_has_the_elements_of_two() -> None:
    def run(w: Tensor) -> Tensor:
        return (w * 1.5) + (1.5 * w)

    program = record_call(run, w=make(4, 3))
    first, second = (op.results[0] for op in list_ops(program, "mul"))
    elements, data = Elements(program), data_of(program, first)
    for wanted in (first, second):
        ids = elements.find(data, lambda root, wanted=wanted: root != wanted)  # type: ignore[misc]
        assert ids is not None
        assert elements.roots(ids) == [wanted]


def test_equal_elements_are_at_the_places_of_a_region() -> None:
    def run(w: Tensor) -> Tensor:
        return w.exp()

    w = make(5, 3)
    w[4] = w[0]
    elements = Elements(record_call(run, w=w))
    ids = elements.find(w[1:], prefer)
    assert ids is not None
    assert ids.tolist() == torch.arange(4, 16).reshape(4, 3).tolist()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (torch.zeros(3), False),
        (torch.ones(3), False),
        (torch.full((3,), 1 / 24, dtype=torch.float64), False),
        (torch.tensor([1, 2, 3]), False),
        (torch.full((1,), 0.123456789, dtype=torch.float64), True),
        (torch.cat([torch.ones(50, dtype=torch.float64), make(1)]), True),
        (None, False),
    ],
)
def test_simple_numbers_tell_nothing(data: Tensor | None, says: bool) -> None:
    assert says_something(data) is says


def test_operators_that_compute_move_nothing() -> None:
    def run(w: Tensor) -> Tensor:
        w = w.masked_fill(w > 0, 0.0)
        w = w.index_put((torch.tensor([0]),), w[:1], accumulate=True)
        return w.to(torch.float32).to(torch.float64) + w.to(torch.bfloat16)

    program = record_call(run, w=make(4, 3))
    moves = [(op.short, is_move(op)) for op in program.ops if op.short in ("masked_fill", "index_put", "add")]
    assert moves == [("masked_fill", True), ("index_put", False), ("add", False)]
    assert [is_move(op) for op in program.ops if op.short == "_to_copy"] == [True, True, False]


def test_tensors_with_the_same_bytes_are_alike() -> None:
    a = torch.tensor([1, 2, 3])
    assert fingerprint(a) == fingerprint(a.clone())
    assert fingerprint(a) != fingerprint(a.flip(0))
    assert fingerprint(a) != fingerprint(a.reshape(3, 1))
    assert fingerprint(a) != fingerprint(a.double())


def test_one_element_of_a_column_has_a_fingerprint() -> None:
    one = torch.arange(16)[8::8]
    assert one.stride() == (8,)
    assert fingerprint(one) == fingerprint(torch.tensor([8]))


@pytest.mark.parametrize(("step", "is_new"), [(-1, True), (0, False)])
def test_weights_that_a_cast_rounds_are_numbers_of_their_own(step: int, *, is_new: bool) -> None:
    drawn = make(6, 4)
    program = record_call(lambda x: x.to(torch.float32).double().sin(), x=drawn)
    for op in program.ops:
        op.step = step
    alignment = Alignment(Joint([program]), program)
    rounded = list_ops(program, "_to_copy")[0].results[0]
    found = alignment.elements.find(drawn.float().double(), lambda root: 0)
    assert (found is not None) is is_new
    assert (alignment.elements.sources[rounded] == frozenset((rounded,))) is is_new
