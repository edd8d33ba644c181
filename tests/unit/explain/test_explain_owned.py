"""Parts of sums with elements that other ranks own: rows, masks, and operators that should make zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recordings import MARK, make, record_call
from torch import Tensor

from moeverify.explain import owned
from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.owned import list_choosing
from moeverify.explain.program import GroupRef, Meeting, Op, Program, Ref, Shown, Value
from moeverify.parallel.regions.region import Region
from moeverify.report.words.culprit import list_culprit

TABLE = make(12, 4)
IDS = torch.tensor([0, 7, 5, 6, 11, 3, 6, 2])
HALF = 6

Part = Callable[[Tensor, Tensor], Tensor]
"""Function of ids, which begin with 0 at the rank's first row, and the rank's rows."""


def look_up(ids: Tensor, rows: Tensor) -> Tensor:
    mine = (ids >= 0) & (ids < len(rows))
    return rows[ids.clamp(0, len(rows) - 1)] * mine[:, None] * 2.0


def look_up_one_more(ids: Tensor, rows: Tensor) -> Tensor:
    mine = (ids >= 0) & (ids <= len(rows))
    return rows[ids.clamp(0, len(rows) - 1)] * mine[:, None] * 2.0


def look_up_one_less(ids: Tensor, rows: Tensor) -> Tensor:
    mine = (ids >= 0) & (ids < len(rows) - 1)
    return rows[ids.clamp(0, len(rows) - 1)] * mine[:, None] * 2.0


def look_up_without_mask(ids: Tensor, rows: Tensor) -> Tensor:
    return rows[ids.clamp(0, len(rows) - 1)] * 2.0


def look_up_in_blocks(ids: Tensor, rows: Tensor) -> Tensor:
    """As `look_up_one_more`, with the blocks of tokens that the ranks get in dim 0."""
    return torch.stack([each.contiguous() for each in look_up_one_more(ids, rows).chunk(2)])


def choose_one_more(ids: Tensor, rows: Tensor) -> Tensor:
    """Return one number for each id, as the logit of a target."""
    mine = (ids >= 0) & (ids <= len(rows))
    return rows[ids.clamp(0, len(rows) - 1)].sum(-1).masked_fill(~mine, 0.0) * 2.0


def record_ranks(part: Part, *, whole: bool = False) -> list[Program]:
    """Record two ranks, which add their parts and take the sine; with `whole`, each has all rows of the table.

    Of a sum in blocks, each rank takes its own.
    """
    starts = (0, 0) if whole else (0, HALF)
    size = len(TABLE) if whole else HALF
    ranks = [record_call(part, ids=IDS - start, rows=TABLE[start : start + size].clone()) for start in starts]
    ends = [program.values[program.marks[MARK][-1].value or 0] for program in ranks]
    total = torch.stack([end.data for end in ends if end.data is not None]).sum(0)
    for rank, (program, end) in enumerate(zip(ranks, ends, strict=True)):
        shape, number, last = tuple(total.shape), len(program.ops), len(program.values)
        options = {"reduction": "sum", "shapes": [shape]}
        meeting = Meeting(GroupRef("pair", (0, 1)), 1)
        own, block, region = (total, 0, Region.whole(shape)) if total.ndim < 3 else (total[rank], rank, None)
        region = region or Region.box((8, 4), [range(4 * rank, 4 * rank + 4), range(4)])
        program.ops += [
            Op(
                number,
                "collective.all_reduce",
                ([Ref(end.number)],),
                options,
                (last,),
                step=0,
                meeting=meeting,
            ),
            Op(number + 1, "aten.select.int", (Ref(last), 0, block), {}, (last + 1,), step=0),
            Op(number + 2, "aten.sin.default", (Ref(last + (total.ndim > 2)),), {}, (last + 2,), step=0),
        ]
        program.values += [
            Value(last, number, shape, "float64", total),
            Value(last + 1, number + 1, shape[1:], "float64", total[block], alias=last),
            Value(last + 2, number + 2, tuple(own.shape), "float64", own.sin()),
        ]
        program.marks[MARK] = [Shown(last + 2, region)]
    return ranks


def make_explainer(part: Part, right: Part = look_up, *, whole: bool = False) -> Explainer:
    one = record_call(lambda ids, rows: right(ids, rows).sin(), ids=IDS, rows=TABLE)
    return Explainer(record_ranks(part, whole=whole), one, 0, (), {"tp": [[0, 1]]})


@pytest.mark.parametrize(
    ("part", "operator", "extra"),
    [
        (look_up_one_more, "bitwise_and", "2 of 8 rows (3, 6)"),
        (look_up_without_mask, "index", "4 of 8 rows (1, 3, 4, 6)"),
    ],
)
def test_rows_of_other_ranks_are_named(part: Part, operator: str, extra: str) -> None:
    explainer = make_explainer(part)
    (cause,) = explainer.explain(20.0)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.proved, culprit.here.operator) == ("owned", True, operator)
    assert culprit.numbers == (("rank 0", extra),)
    assert culprit.repaired == ("loss/total",)
    assert culprit.names_cause
    rows = dict(list_culprit(culprit))
    assert rows["here"] == (
        f"of the part that rank 0 adds to a sum, {extra} should be zero: other ranks add them"
    )


def test_rows_that_no_rank_adds_are_named() -> None:
    explainer = make_explainer(look_up_one_less)
    (cause,) = explainer.explain(20.0)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.here.operator) == ("owned", "mul")
    rows = dict(list_culprit(culprit))
    assert rows["here"] == (
        "2 of 8 rows (2, 4) of a sum over the ranks are zero in all parts: one rank should add them"
    )


def test_single_numbers_of_other_ranks_are_named() -> None:
    explainer = make_explainer(choose_one_more, lambda ids, rows: rows[ids].sum(-1) * 2.0)
    (cause,) = explainer.explain(20.0)
    assert (cause.repairs[0].kind, cause.repairs[0].numbers) == (
        "owned",
        (("rank 0", "2 of 8 elements (3, 6)"),),
    )
    assert [explainer.joint.op(op).short for op in cause.ops] == ["bitwise_and"]


def test_the_mask_of_the_part_is_followed_to_its_comparisons() -> None:
    explainer = make_explainer(look_up_one_more)
    (cause,) = explainer.explain(20.0)
    chosen = [explainer.joint.op(op).short for op in list_choosing(explainer.joint, cause.ops[0])]
    assert chosen == ["ge", "le"]


def test_a_part_that_was_moved_is_followed_to_its_shape_on_one_device() -> None:
    explainer = make_explainer(look_up_in_blocks)
    (cause,) = explainer.explain(20.0)
    assert (cause.repairs[0].kind, cause.repairs[0].numbers) == ("owned", (("rank 0", "2 of 8 rows (3, 6)"),))


@pytest.mark.parametrize("part", [look_up, look_up_without_mask])
def test_whole_values_on_each_rank_are_no_parts(part: Part) -> None:
    explainer = make_explainer(part, whole=True)
    kinds = [edit.kind for cause in explainer.explain(20.0) for edit in cause.repairs]
    assert kinds
    assert "owned" not in kinds


def test_a_right_sum_needs_no_change() -> None:
    assert not make_explainer(look_up).explain(20.0)


def test_the_parts_of_a_single_number_own_nothing() -> None:
    assert owned._correct(torch.tensor([1.0, 2.0]), torch.tensor(3.0)) is None
    assert owned._correct(torch.tensor([3.0, 2.0]), torch.tensor(3.0)) is None
