"""What is read from the operands of an all-reduce: other ranks, another combination, one reduction too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from wrong_tensors import WEIGHT, draw, examine, make_inputs, make_origin, make_tensor

from moeverify.diagnose.axes import Axes
from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.hypotheses.base import Outcome
from moeverify.diagnose.operands import ReducedTensor
from moeverify.diagnose.reductions import Bringing, Brought
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.factor import Product
from moeverify.results.trace import CollectiveRecord

# Four ranks: 0 and 1 are one group of `ep`, 0 and 2 one of `edp`.
GROUPS = {"ep": [[0, 1], [2, 3]], "edp": [[0, 2], [1, 3]], "world": [[0, 1, 2, 3]]}
AXES = Axes(GROUPS)


def record(rank: int, groups: Sequence[Sequence[int]], op: str) -> CollectiveRecord:
    group = next(tuple(group) for group in groups if rank in group)
    root = 0 if op == "broadcast" else -1
    return CollectiveRecord(
        number=1,
        op=op,
        group=group,
        group_name="",
        sequence=1,
        peer=root,
        site="plan.py:1",
        state="finished",
    )


def over(axis: str, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of each rank's group."""
    group_of = {rank: group for group in GROUPS[axis] for rank in group}
    return [torch.stack([parts[other] for other in group_of[rank]]).sum(dim=0) for rank in range(4)]


def ask(
    parts: Sequence[Tensor],
    met: str,
    actual: Sequence[Tensor],
    expected: Tensor,
    kind: str = "gradient",
    op: str = "all_reduce",
) -> Outcome:
    tensor = make_tensor(expected, *actual, name=WEIGHT, kind=kind)
    brought = {rank: [Brought(record(rank, GROUPS[met], op), parts[rank].reshape(-1))] for rank in range(4)}
    return examine("misreduced", tensor, make_inputs(tensor, axes=AXES, brought=brought))


def make_parts() -> list[Tensor]:
    """Return what ranks bring, of which both groups of edp have the same sum: 0 + 2 = 1 + 3."""
    first, second, third = (draw(3, 4, seed=seed) for seed in range(3))
    return [first, second, third, first + third - second]


def test_a_sum_over_the_whole_world_in_the_place_of_an_axis() -> None:
    parts = make_parts()
    outcome = ask(parts, "world", over("world", parts), over("edp", parts)[0])
    operation = outcome.explanation.operation
    assert operation.axes == (Product(times=("edp",)),)
    assert operation.met == (Product(times=("world",)),)
    assert operation.site == "plan.py:1"
    assert outcome.explanation.cause is Cause.MISSING_REDUCTION


def test_the_divisor_after_it_does_not_matter() -> None:
    parts = make_parts()
    actual = [values / 8 for values in over("ep", parts)]
    outcome = ask(parts, "ep", actual, over("edp", parts)[0] / 8)
    assert outcome.explanation.operation.axes == (Product(times=("edp",)),)


def test_what_is_no_number_is_no_sum_of_anything() -> None:
    parts = [torch.full((3, 4), torch.nan, dtype=torch.float64) for _ in range(4)]
    assert ask(parts, "edp", over("edp", parts), draw(3, 4, seed=0)).explanation is None


def test_the_largest_in_the_place_of_the_sum() -> None:
    parts = make_parts()
    largest = [torch.maximum(parts[rank], parts[(rank + 2) % 4]) for rank in range(4)]
    operation = ask(parts, "edp", largest, over("edp", parts)[0]).explanation.operation
    assert operation.combination == "max"
    assert operation.axes == (Product(times=("edp",)),)


def test_a_broadcast_in_the_place_of_the_sum() -> None:
    parts = make_parts()
    copied = [parts[0], parts[1], parts[0], parts[1]]
    outcome = ask(parts, "edp", copied, over("edp", parts)[0], op="broadcast")
    assert outcome.explanation.operation.combination == "copy"
    assert outcome.explanation.operation.axes == (Product(times=("edp",)),)
    # A right broadcast of what is wrong already has no sum that would be right.
    wrong = [parts[0] * 2, *parts[1:]]
    assert ask(wrong, "edp", copied, over("edp", parts)[0], op="broadcast").explanation is None


def test_what_is_right_already_is_reduced_once_more() -> None:
    right = draw(3, 4)
    outcome = ask([right] * 4, "ep", [2 * right] * 4, right)
    assert outcome.explanation.operation.axes == ()
    assert outcome.explanation.candidates == (Product(times=("ep",)),)
    counts = ask([right] * 4, "ep", [2 * right] * 4, right, kind="router_counts")
    assert counts.explanation.cause is Cause.STATE


def test_a_reduction_with_ranks_that_have_another_tensor_is_read_too() -> None:
    # Ranks 2 and 3 are another stage of a pipeline: what they bring has the shape of the tensor, and is another one.
    right, other = draw(3, 4), draw(3, 4, seed=1)
    brought = {
        rank: [Brought(record(rank, GROUPS["world"], "all_reduce"), each.reshape(-1))]
        for rank, each in enumerate((right, right, other, other))
    }
    total = 2 * right + 2 * other
    tensor = make_tensor(right, total, total)
    outcome = examine("misreduced", tensor, make_inputs(tensor, axes=AXES, brought=brought))
    assert outcome.explanation.operation.axes == ()
    assert outcome.explanation.operation.ranks == (0, 1, 2, 3)
    del brought[3]
    assert examine("misreduced", tensor, make_inputs(tensor, axes=AXES, brought=brought)).explanation is None


def test_a_sum_that_is_made_in_the_module_around_is_read_there() -> None:
    # The experts have partial sums by right; the dispatcher that calls them adds these up over other ranks.
    parts = [part.view(1, 3, 4) for part in make_parts()]
    region = Region.whole((1, 3, 4))

    def located(values: Sequence[Tensor]) -> WrongTensor:
        shards = tuple(RankShard(rank, region, value) for rank, value in enumerate(values))
        return WrongTensor((0, "module output", "moe.dispatcher"), over("edp", parts)[0], shards)

    records = {rank: record(rank, GROUPS["world"], "all_reduce") for rank in range(4)}
    brought = ReducedTensor(located(parts), records[0], records)
    tensor = located(over("world", parts))
    around = Origin("forward", "moe.dispatcher", "output", 1.0, (0,), tensor, reduced=(brought,))
    experts, inputs = make_origin(draw(1, 3, 4, seed=9), *parts, module="moe.experts")
    assert inputs.search is not None
    assert examine("misreduced", experts, replace(inputs, axes=AXES)).explanation is None
    search = replace(inputs.search, around={"forward": (around,)})
    explanation = examine("misreduced", experts, replace(inputs, search=search, axes=AXES)).explanation
    assert explanation.subject.module == "moe.dispatcher"
    assert explanation.operation.axes == (Product(times=("edp",)),)


def test_a_sum_of_tensors_of_another_size_is_not_read() -> None:
    # Under sequence parallelism a module may have all positions where the one beside it has a shard.
    region = Region.whole((1, 3, 4))
    shards = tuple(RankShard(rank, region, values.view(1, 3, 4)) for rank, values in enumerate(make_parts()))
    larger = WrongTensor((0, "module output", "moe"), draw(1, 3, 4), shards)
    records = {rank: record(rank, GROUPS["world"], "all_reduce") for rank in range(4)}
    tensor, inputs = make_origin(
        draw(1, 3, 2), *[draw(1, 3, 2, seed=seed) for seed in range(4)], module="moe"
    )
    assert inputs.search is not None
    ((name, origin),) = inputs.search.origins.items()
    origin = replace(origin, reduced=(ReducedTensor(larger, records[0], records),))
    search = replace(inputs.search, origins={name: origin})
    assert examine("misreduced", tensor, replace(inputs, search=search, axes=AXES)).explanation is None


def test_a_right_reduction_of_wrong_parts_is_not_blamed() -> None:
    parts = make_parts()
    wrong = [parts[0] * 2, *parts[1:]]
    assert ask(wrong, "edp", over("edp", wrong), over("edp", parts)[0]).explanation is None


def test_what_does_not_come_out_of_the_collective_is_not_read() -> None:
    parts = make_parts()
    changed = [values + 1.0 for values in over("world", parts)]
    assert ask(parts, "world", changed, over("edp", parts)[0]).explanation is None


def test_only_operands_of_asked_sizes_are_kept_while_it_is_open() -> None:
    bringing = Bringing({12}, limit=20)
    bringing.keep(1, draw(3, 4))
    bringing.is_open = True
    bringing.keep(2, draw(5))
    bringing.keep(3, draw(3, 4))
    bringing.keep(4, draw(3, 4))  # there is no room for a second one
    assert [number for number, _ in bringing.brought] == [3]
