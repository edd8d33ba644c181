"""Experts that are on some ranks each: the sum over their holders was not made."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, examine, make_inputs

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.hypotheses.base import Outcome
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.factor import Product, Source
from moeverify.results.operation import Unreduced

WHOLE = draw(6, 5)
PART = draw(6, 5, seed=1)


def ask(rows: Sequence[Sequence[int]], locals_: Sequence[Tensor], **axes: int) -> Outcome:
    shards = tuple(
        RankShard(rank, Region.box(WHOLE.shape, (held, range(5))), local)
        for rank, (held, local) in enumerate(zip(rows, locals_, strict=True))
    )
    tensor = WrongTensor((0, "gradient", "layers.1.moe.experts.up"), WHOLE, shards)
    sources = [Source(name=name, size=size) for name, size in axes.items()]
    return examine("held_sum", tensor, make_inputs(tensor, axes=Axes({}, sources)))


def split(first: Sequence[int], second: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """Return two ranks' parts of their experts; experts on both ranks have a part on each."""
    shared = torch.tensor(
        [float(row in first and row in second) for row in range(6)], dtype=WHOLE.dtype
    ).unsqueeze(1)
    mine = WHOLE - shared * PART
    return scale * mine[list(first)], scale * torch.where(shared > 0, PART, WHOLE)[list(second)]


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize(("first", "second"), [((0, 1, 2, 3), (2, 3, 4, 5)), ((0, 2, 4), (1, 2, 3, 4, 5))])
def test_experts_on_ranks_of_their_own_are_named(
    first: Sequence[int], second: Sequence[int], scale: float
) -> None:
    explanation = ask((first, second), split(first, second, scale), dp_shard=2).explanation
    assert explanation.cause is Cause.MISSING_REDUCTION
    assert isinstance(explanation.operation, Unreduced)
    assert (explanation.operation.is_over_holders, explanation.operation.num_replicas) == (True, 2)
    assert explanation.operation.factor.equals == ((Product(times=("dp_shard",)),) if scale == 2.0 else ())


def test_a_multiple_that_nothing_counts_is_no_sum() -> None:
    held = ((0, 1, 2, 3), (2, 3, 4, 5))
    assert ask(held, split(*held, 3.0), dp_shard=2).explanation is None


def test_what_equals_on_all_its_ranks_is_no_partial_sum() -> None:
    held = ((0, 1, 2, 3), (2, 3, 4, 5))
    assert ask(held, [2.0 * WHOLE[list(rows)] for rows in held], dp_shard=2).explanation is None


def test_what_all_ranks_have_or_one_alone_is_asked_elsewhere() -> None:
    everything = tuple(range(6))
    assert ask((everything, everything), (PART, WHOLE - PART), dp_shard=2).explanation is None
    assert ask(((0, 1, 2), (3, 4, 5)), (WHOLE[:3], 2.0 * WHOLE[3:]), dp_shard=2).explanation is None
