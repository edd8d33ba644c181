"""Blocks of parameters that ranks choose by the wrong coordinate: the right axis is proved by execution."""

from __future__ import annotations

import pytest
from recordings import find_input, make, record_call
from torch import Tensor

from moeverify.explain.blocks import list_blocks
from moeverify.explain.cause import OperatorCause
from moeverify.explain.culprits import Culprits
from moeverify.explain.edit import Edit
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Joint
from moeverify.explain.program import SETUP, Program, Shown
from moeverify.parallel.regions.region import Region
from moeverify.report.words.culprit import list_culprit
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind

GROUPS = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
SHAPE = (6, 4)
X, WEIGHTS = make(*SHAPE), {name: make(*SHAPE, seed=seed) for seed, name in enumerate(("w0", "w1"), 1)}


def compute(x: Tensor, w0: Tensor, w1: Tensor) -> Tensor:
    return (x * w0 + w1).sin()


def rows_of(block: int) -> Region:
    return Region.box(SHAPE, [range(3 * block, 3 * block + 3), range(SHAPE[1])])


def record(region: Region, own: Region) -> Program:
    """Record one rank: `region` of the inputs and the result, `own` of the weights."""
    weights = {name: own.take(each).clone() for name, each in WEIGHTS.items()}
    program = record_call(compute, region, x=region.take(X).clone(), **weights)
    for name in weights:
        program.marks[SETUP, Kind.INITIAL_WEIGHT, name] = [Shown(find_input(program, name)[1], own)]
    return program


def make_explainer(*blocks: int) -> Explainer:
    """Return the explainer of four ranks: inputs are divided over tp, and weights have `blocks`."""
    ranks = [record(rows_of(rank % 2), rows_of(block)) for rank, block in enumerate(blocks)]
    whole = Region.whole(SHAPE)
    return Explainer(ranks, record(whole, whole), 0, (), GROUPS)


def list_all(explainer: Explainer) -> list[Edit]:
    one = explainer.one.program
    return [
        edit
        for of_axes in (False, True)
        for edit in list_blocks(explainer.joint, one, GROUPS, of_axes=of_axes)
    ]


def test_blocks_of_another_axis_are_named() -> None:
    explainer = make_explainer(0, 0, 1, 1)
    (edit,) = list_all(explainer)
    culprit = Culprits(explainer).make(OperatorCause(list(edit.ops), [edit], explainer.wrong))
    assert (culprit.mechanism, culprit.proved, culprit.axes) == ("block", True, ("dp", "tp"))
    assert (culprit.ranks, culprit.results) == ((1, 2), ("w0", "w1"))
    assert (culprit.code, culprit.names_cause) == (Cause.LAYOUT, True)
    rows = dict(list_culprit(culprit))
    assert rows["here"] == (
        "rank 1 has [0:3] of dim 0 of w0 and 1 more tensor by its coordinate on dp; "
        "[3:6] of dim 0 by its coordinate on tp"
    )


@pytest.mark.parametrize(
    ("blocks", "axes"),
    [
        ((0, 1, 0, 1), [("tp", "dp")]),  # right: the other axis remains to be tried
        ((0, 0, 0, 0), [("", "dp"), ("", "tp")]),  # one block on all ranks
        ((1, 0, 1, 0), [("", "dp"), ("", "tp")]),  # in another order
    ],
)
def test_blocks_of_each_axis_are_tried(blocks: tuple[int, ...], axes: list[tuple[str, str]]) -> None:
    explainer = make_explainer(*blocks)
    edits = list_all(explainer)
    assert [edit.numbers[0] for edit in edits] == axes
    assert all(edit.place == ("w0", "w1") for edit in edits)


def test_one_block_of_all_ranks_is_named_by_the_axis_that_divides_the_inputs() -> None:
    explainer = make_explainer(0, 0, 0, 0)
    (cause,) = explainer.explain(60)
    assert (cause.repairs[0].kind, cause.repairs[0].numbers[0]) == ("block", ("", "tp"))


def test_parts_of_unequal_size_are_no_blocks() -> None:
    own = Region.box(SHAPE, [range(4), range(SHAPE[1])])
    programs = [record(own, own), record(own, own)]
    whole = Region.whole(SHAPE)
    one = record(whole, whole)
    joint = Joint(programs, {})
    assert not [*list_blocks(joint, one, {"tp": [[0, 1]]}, of_axes=False)]


def test_a_parameter_of_another_shape_on_one_device_has_no_blocks() -> None:
    explainer = make_explainer(0, 0, 0, 0)
    one = explainer.one.program
    (total,) = (value.number for value in one.values if one.ops[value.op].short == "sin")
    one.values[total].shape = (SHAPE[0] * SHAPE[1],)
    for name in WEIGHTS:
        one.marks[SETUP, Kind.INITIAL_WEIGHT, name][0].value = total
    assert not list_all(explainer)
