"""Values in another layout's order: each mistake is made with torch's own reshapes, and must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, examine, make_inputs, make_origin, make_sharded

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.first_divergence import Divergence, Search
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.layouts.orders import Grid, list_orders, list_turns, locate
from moeverify.explain.fitting.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.report.words.observation import describe_observation
from moeverify.results.cause import Cause
from moeverify.results.factor import Source
from moeverify.results.layout import Dim, Order, Reordered

BATCH, LENGTH, WIDTH, RANKS = 4, 12, 20, 2
EXPECTED = draw(BATCH, LENGTH, WIDTH)
HALVES = ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11))
ZIGZAG = ((0, 1, 2, 9, 10, 11), (3, 4, 5, 6, 7, 8))
CONTEXT = Axes({"cp": [[0, 1]]}, [Source(name="cp", size=2)])


def make_output(
    compute: Callable[[list[Tensor]], list[Tensor]], parts: tuple[tuple[int, ...], ...] = HALVES
) -> tuple[WrongTensor, DiagnosisInputs]:
    """Return two cp ranks' parts of a module's output; `compute` gets the right parts."""
    right = [EXPECTED[:, list(part)] for part in parts]
    regions = [Region.box(EXPECTED.shape, (range(BATCH), part, range(WIDTH))) for part in parts]
    shards = tuple(
        RankShard(rank, region, local)
        for rank, (region, local) in enumerate(zip(regions, compute(right), strict=True))
    )
    tensor = WrongTensor((0, MODULE_KINDS["forward"], "layers.0.attention"), EXPECTED, shards)
    origin = Divergence("forward", "layers.0.attention", "output", 1.0, (0, 1), tensor)
    right_counts = {"forward": 3, "backward": 3}
    search = Search({"forward": origin}, right_counts, dict.fromkeys(right_counts, 1e-16))
    return tensor, DiagnosisInputs(axes=CONTEXT, search=search)


def name(order: Order) -> tuple[str, str]:
    return order.way, " ".join(f"{dim.name}{dim.size}" for dim in order.dims)


def find(tensor: WrongTensor, inputs: DiagnosisInputs) -> Reordered | None:
    explanation = examine("reordered", tensor, inputs).explanation
    if explanation is None:
        return None
    assert isinstance(explanation.operation, Reordered)
    return explanation.operation


def each(change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda right: [change(one) for one in right]


def gather(change: Callable[[Tensor], Tensor], dim: int = 1) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda right: list(change(torch.cat(right, dim)).chunk(RANKS, dim))


ON_EACH_RANK = [
    (lambda x: x.transpose(0, 1).reshape(x.shape), ("stored", "sequence6 batch4 features20")),
    (lambda x: x.reshape(6, BATCH, WIDTH).transpose(0, 1), ("read", "sequence6 batch4 features20")),
    (lambda x: x.transpose(1, 2).reshape(x.shape), ("stored", "batch4 features20 sequence6")),
    (lambda x: x.flip(1), ("reversed", "sequence6")),
    (lambda x: x.roll(1, 0), ("rolled", "batch4")),
    (lambda x: x.roll(-1, 1), ("rolled", "sequence6")),
    (lambda x: x.unflatten(1, (2, 3)).flip(1).flatten(1, 2), ("reversed", "chunks2")),
    (
        lambda x: x.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2),
        ("stored", "batch4 sequence3 chunks2 features20"),
    ),
    (lambda x: x.unflatten(2, (4, 5)).transpose(2, 3).flatten(2), ("stored", "batch4 sequence6 width5 parts4")),
    (lambda x: x.unflatten(2, (5, 4)).flip(2).flatten(2), ("reversed", "parts5")),
    # Heads of two ranks, interleaved.
    (
        lambda x: x.unflatten(2, (2, 5, 2)).transpose(2, 3).flatten(2),
        ("stored", "batch4 sequence6 parts5 groups2 width2"),
    ),
    # [batch, sequence, heads, width] as [batch, heads, sequence, width]
    (
        lambda x: x.unflatten(2, (4, 5)).transpose(1, 2).reshape(x.shape),
        ("stored", "batch4 parts4 sequence6 width5"),
    ),
    (lambda x: x[:1].expand(x.shape), ("same", "batch4")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), ON_EACH_RANK)
def test_what_each_rank_has_in_another_layout(
    change: Callable[[Tensor], Tensor], named: tuple[str, str]
) -> None:
    found = find(*make_output(each(change)))
    assert found is not None
    assert (found.scope, [name(order) for order in found.orders], found.ranks) == ("rank", [named], ())


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        (lambda x: x.roll(1, 0), True),
        (lambda x: x.flatten()[torch.randperm(x.numel())].view(x.shape), False),
    ],
)
def test_the_evidence_says_how_many_orders_give_every_value(
    change: Callable[[Tensor], Tensor], is_found: bool
) -> None:
    tensor, inputs = make_output(each(change))
    outcome = examine("reordered", tensor, inputs)
    assert (outcome.explanation is not None) == is_found
    assert ["gives every value" in describe_observation(one) for one in outcome.observations] == [
        True
    ] * is_found


OF_ALL_RANKS = [
    (lambda right: right[::-1], "group", ("reversed", "ranks2")),
    (lambda right: [right[0], right[0]], "group", ("same", "ranks2")),
    # Gathered as [ranks, batch, ...] and taken for [batch, ranks, ...].
    (
        lambda right: list(torch.stack(right).reshape(BATCH, RANKS, 6, WIDTH).unbind(1)),
        "group",
        ("read", "batch4 ranks2 sequence6 features20"),
    ),
    # Rank 0 has every second position, rank 1 the others.
    (
        lambda right: [torch.cat(right, 1)[:, rank::2] for rank in range(RANKS)],
        "group",
        ("read", "batch4 sequence6 chunks2 features20"),
    ),
]


@pytest.mark.parametrize(("compute", "scope", "named"), OF_ALL_RANKS)
def test_what_the_ranks_of_an_axis_have_together_in_another_layout(
    compute: Callable[[list[Tensor]], list[Tensor]], scope: str, named: tuple[str, str]
) -> None:
    found = find(*make_output(compute))
    assert found is not None
    assert (found.scope, name(found.orders[0])) == (scope, named)


def test_chunks_in_the_plain_order_in_the_place_of_a_zigzag() -> None:
    plain = [EXPECTED[:, list(part)] for part in HALVES]
    found = find(*make_output(lambda right: plain, ZIGZAG))
    assert found is not None
    assert [name(order) for order in found.orders] == [("out-of-zigzag", "chunks4")]


def test_ranks_that_are_right_are_spared() -> None:
    found = find(*make_output(lambda right: [right[0], right[1].flip(1)]))
    assert found is not None
    assert found.ranks == (1,)


def test_heads_are_called_by_their_name() -> None:
    tensor, inputs = make_output(each(lambda x: x.unflatten(2, (4, 5)).flip(2).flatten(2)))
    axes = replace(inputs.axes, module_counts=[Source(name="heads", size=4)])
    found = find(tensor, replace(inputs, axes=axes))
    assert found is not None
    assert name(found.orders[0]) == ("reversed", "heads4")


@pytest.mark.parametrize(
    "compute",
    [
        each(lambda x: x),
        each(lambda x: draw(*x.shape, seed=1)),
        each(lambda x: 2.0 * x),
        each(torch.zeros_like),
        each(lambda x: x.flip(1) + 1e-6),
        each(lambda x: torch.cat([x.flip(1)[:, :-1], x[:, -1:] * 1.001], 1)),  # except for one token
        each(lambda x: x[:, torch.tensor([3, 1, 5, 0, 2, 4])]),  # an order outside the grammar
    ],
)
def test_what_no_layout_explains(compute: Callable[[list[Tensor]], list[Tensor]]) -> None:
    assert find(*make_output(compute)) is None


def test_what_the_whole_batch_has_in_another_layout() -> None:
    whole = EXPECTED.transpose(0, 1).reshape(EXPECTED.shape)
    found = find(*make_output(lambda right: [whole[:, list(part)] for part in HALVES]))
    assert found is not None
    assert (found.scope, name(found.orders[0])) == ("whole", ("stored", "sequence12 batch4 features20"))


WEIGHTS = [
    (lambda w: w.T.reshape(w.shape), ("stored", "columns6 rows12")),
    (lambda w: w.unflatten(0, (2, 6)).transpose(0, 1).flatten(0, 1), ("stored", "rows6 parts2 columns6")),
    (lambda w: w.unflatten(0, (3, 4)).roll(1, 0).flatten(0, 1), ("rolled", "parts3")),
    (lambda w: w.unflatten(1, (2, 3)).flip(1).flatten(1), ("reversed", "parts2")),
    (lambda w: w.unflatten(0, (3, 4))[:1].expand(3, 4, 6).reshape(w.shape), ("same", "parts3")),
]


@pytest.mark.parametrize(("change", "named"), WEIGHTS)
def test_weights_in_another_layout(change: Callable[[Tensor], Tensor], named: tuple[str, str]) -> None:
    expected = draw(12, 6)
    tensor = make_sharded(expected, *change(expected).chunk(2), kind="initial_weight")
    outcome = examine("reordered", tensor, make_inputs(tensor, axes=CONTEXT))
    assert outcome.explanation is not None
    assert name(outcome.explanation.operation.orders[0]) == named
    assert outcome.explanation.cause is (Cause.DUPLICATE if named[0] == "same" else Cause.PERMUTATION)


@pytest.mark.parametrize(("largest", "is_known"), [(1.0, True), (1000.0, False)])
def test_rounded_values_are_known_where_their_errors_are_far_larger_than_rounding(
    largest: float, is_known: bool
) -> None:
    # Two rows that swap places, with a number so large that the change is not much more than rounding.
    expected = draw(12, 6).clamp(-1.0, 1.0)
    expected[0, 0] = expected[11, 0] = largest
    actual = expected.flip(0).to(torch.float32).to(torch.float64)
    tensor = make_sharded(expected, *actual.chunk(2), kind="initial_weight", precision=torch.float32)
    outcome = examine("reordered", tensor, make_inputs(tensor, axes=CONTEXT))
    assert (outcome.explanation is not None) == is_known


def make_micro_batches(*locals_: Tensor) -> tuple[WrongTensor, DiagnosisInputs]:
    """Return one rank's micro-batches of two rows each."""
    regions = [
        Region.box(EXPECTED.shape, (range(2 * n, 2 * n + 2), range(LENGTH), range(WIDTH))) for n in range(2)
    ]
    shards = tuple(RankShard(0, region, local) for region, local in zip(regions, locals_, strict=True))
    _, inputs = make_origin(EXPECTED, EXPECTED.flip(0))
    assert inputs.search is not None
    origin = inputs.search.origins["forward"]
    tensor = replace(origin.tensor, shards=shards)
    search = replace(inputs.search, origins={"forward": replace(origin, tensor=tensor)})
    return tensor, replace(inputs, search=search)


def test_one_micro_batch_alone_may_have_another_order() -> None:
    found = find(*make_micro_batches(EXPECTED[:2], EXPECTED[2:].roll(1, 1)))
    assert found is not None
    assert (name(found.orders[0]), found.micro_batches) == (("rolled", "sequence12"), (1,))


def test_every_order_is_one_of_all_places() -> None:
    """An order of dims moves every value; turns along a dim do too, except those that copy one part."""
    grid = Grid((Dim(name="batch", size=2), Dim(name="sequence", size=6), Dim(name="features", size=3)))
    grid = grid.take_apart(1, Dim(name="chunks", size=2, of="sequence"), "sequence")
    places = torch.arange(36)
    orders = [*list_orders(grid), *list_turns(grid, 1), *list_turns(grid, 3)]
    assert len(orders) > 40
    for order in orders:
        is_all = torch.equal(locate(order, places).sort().values, places)
        assert is_all == (order.way != "same")
    assert all(one != other for one, other in pairwise(orders))
