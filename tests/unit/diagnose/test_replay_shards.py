"""Products that three ranks of tp divide, and sums of them, with another slice, another chunk or another part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import name_changes
from torch import Tensor, nn
from wrong_tensors import draw

from moeverify.diagnose.rank_readings import RankReadings
from moeverify.diagnose.replay.calls import ModuleCalls
from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.language import Found, NamedFormula, find_variant
from moeverify.diagnose.replay.sharded_formulas import divide_formula, list_products
from moeverify.diagnose.replay.shards import SLICES, SUM, ProductsFormula, ShardedFormula, Shards, make_shards
from moeverify.diagnose.replay.tokenwise import (
    GatedFormula,
    GatedGradientFormula,
    LinearFormula,
    TokenGradientFormula,
)
from moeverify.diagnose.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.model.mlp import MLP
from moeverify.report.words.variant import describe_variant
from moeverify.train.module_taps import Reading

B, S, F, H, N = 2, 6, 12, 5, 3
X, GIVEN, WEIGHT = draw(B, S, F, seed=1), draw(B, S, H, seed=2), draw(H, F, seed=3)
SHARDS = make_shards(N, range(N), Chunks([range(S)]), divides_positions=True)
PLACES = [torch.tensor([2 * rank, 2 * rank + 1]) for rank in range(N)]


def part(k: int, of: int | None = None) -> Tensor:
    """Return the product of the slices of rank k of X with that of the weight, of rank k or of another one."""
    return X.chunk(N, -1)[k] @ WEIGHT.chunk(N, 1)[k if of is None else of].T


def make_layer(*, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(F, H, bias=bias).double()
    layer.weight.data.copy_(WEIGHT)
    return layer


def make_tensor(right: Tensor, made: Callable[[int], Tensor], split: str) -> WrongTensor:
    """Return what each rank has of a tensor: its positions, its features, or all of it."""
    shards = []
    for rank in range(N):
        positions: Any = range(2 * rank, 2 * rank + 2) if split == "positions" else range(S)
        width = right.shape[-1] // N
        features: Any = (
            range(rank * width, (rank + 1) * width) if split == "features" else range(right.shape[-1])
        )
        region = Region.box(right.shape, (range(B), positions, features))
        shards.append(RankShard(rank, region, region.take(made(rank)).reshape(region.local_shape)))
    return WrongTensor((0, MODULE_KINDS["backward"], "layer"), right, tuple(shards))


def explain(formula: ShardedFormula, tensor: WrongTensor) -> Found | None:
    return find_variant(formula, tensor, 1e-10)


TOTAL = sum((part(k) for k in range(N)), torch.zeros(B, S, H, dtype=torch.float64))


@pytest.mark.parametrize(
    ("made", "way"),
    [
        (lambda rank: TOTAL + part(rank), "own-twice"),
        (lambda rank: TOTAL - part(rank), "not-own"),
        (part, "own"),
        (lambda rank: TOTAL - part(1), "without"),
        (lambda rank: sum(part(k, rank) for k in range(N)), "weights-own"),
        (lambda rank: sum(part(k, (k + 1) % N) for k in range(N)), "weights-next"),
        (lambda rank: X.chunk(N, -1)[rank] @ sum(WEIGHT.chunk(N, 1)).T, "inputs-own"),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_over_ranks_that_is_made_otherwise_is_named(
    made: Callable[[int], Tensor], way: str, bias: bool
) -> None:
    layer = make_layer(bias=bias)
    added = 0.0 if layer.bias is None else layer.bias.detach()
    formula = ShardedFormula(LinearFormula(layer, X, {}, {}), SHARDS, "sum")
    tensor = make_tensor(TOTAL + added, lambda rank: made(rank) + added, "all")
    assert name_changes(explain(formula, tensor)) == [[(SUM, way)]]


def test_a_sum_that_is_scattered_otherwise_is_named() -> None:
    summed = sum(part(k)[:, PLACES[k]] for k in range(N))
    formula = ShardedFormula(LinearFormula(make_layer(), X, {}, {}), SHARDS, "sum")
    tensor = make_tensor(TOTAL, lambda rank: torch.cat([summed] * N, 1), "positions")
    assert name_changes(explain(formula, tensor)) == [[(SUM, "own-chunks")]]
    moved = torch.cat([TOTAL[:, PLACES[2]], TOTAL[:, PLACES[0]], TOTAL[:, PLACES[1]]], 1)
    tensor = make_tensor(TOTAL, lambda rank: moved, "positions")
    assert name_changes(explain(formula, tensor)) == [[(SUM, "chunk-before")]]


def test_parts_with_weights_of_their_own_are_no_such_sum() -> None:
    formula = ShardedFormula(LinearFormula(make_layer(), X, {}, {}), SHARDS, "sum")
    tensor = make_tensor(TOTAL, lambda rank: TOTAL + 0.3 * part(1) - 0.2 * part(2), "all")
    assert name_changes(explain(formula, tensor)) == []


def take_of_position(whole: Tensor) -> Tensor:
    """Return on all ranks at each position the slice of the rank that has it."""
    own = torch.cat([whole.chunk(N, -1)[rank][:, PLACES[rank]] for rank in range(N)], 1)
    return torch.cat([own] * N, -1)


@pytest.mark.parametrize(
    ("turn", "way"),
    [
        (take_of_position, "of-position"),
        (lambda whole: torch.cat([whole.chunk(N, -1)[k] for k in (1, 2, 0)], -1), "next"),
        (lambda whole: torch.cat([sum(whole.chunk(N, -1))] * N, -1), "summed"),
    ],
)
def test_a_slice_that_a_row_wise_layer_passes_back_is_that_of_another_rank(
    turn: Callable[[Tensor], Tensor], way: str
) -> None:
    forward = LinearFormula(make_layer(), X, {}, {})
    formula = ShardedFormula(TokenGradientFormula(forward, GIVEN), SHARDS, "result")
    right = GIVEN @ WEIGHT
    tensor = make_tensor(right, lambda rank: turn(right), "features")
    found = name_changes(explain(formula, tensor))
    assert found is not None
    assert [(SLICES, way)] in found


def test_what_is_made_of_another_slice_of_a_gradient_is_named() -> None:
    gate, up, given = (draw(B, S, F, seed=seed) for seed in (4, 5, 6))
    inner = GatedGradientFormula(GatedFormula(gate, up), "up", given)
    formula = ShardedFormula(inner, SHARDS, "given")
    slope = nn.functional.silu(gate)
    tensor = make_tensor(given * slope, lambda rank: take_of_position(given) * slope, "features")
    found = explain(formula, tensor)
    assert name_changes(found) == [[(SLICES, "of-position")]]
    assert found is not None
    assert "that comes back from its last layer" in describe_variant("gradient:x", found.variants[0])


def test_what_several_layers_pass_back_is_a_sum_of_their_products() -> None:
    block = MLP(H, F, activation="swiglu", bias=False, factory={"dtype": torch.float64})
    for seed, parameter in enumerate(block.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=20 + seed))
    given = {"block.up_proj": draw(B, S, F, seed=7), "block.gate_proj": draw(B, S, F, seed=8)}
    products = list_products(block, "block", lambda module, end, direction="forward": given.get(module))
    assert isinstance(products, ProductsFormula)
    layers = [(given["block.gate_proj"], block.gate_proj), (given["block.up_proj"], block.up_proj)]
    right = sum(
        (x @ layer.weight.detach() for x, layer in layers if layer is not None), torch.zeros(B, S, H).double()
    )

    def lose(rank: int) -> Tensor:
        own = (
            x.chunk(N, -1)[rank] @ layer.weight.detach().chunk(N, 0)[rank]
            for x, layer in layers
            if layer is not None
        )
        return right - sum(own, torch.zeros(B, S, H).double())

    formula = ShardedFormula(products, SHARDS, "sum")
    assert name_changes(explain(formula, make_tensor(right, lose, "positions"))) == [[(SUM, "not-own")]]


def test_what_ranks_divide_is_read_at_the_ends_of_the_layer() -> None:
    named = NamedFormula("linear-layer", LinearFormula(make_layer(), X, {}, {}))
    share = [(range(B), range(S))]

    def divide(end: str) -> Any:
        golden = [Reading("forward", 0, "layer", end, 0, X if end == "input" else draw(B, S, H))]
        cut = [Reading("forward", 0, "layer", end, 0, golden[0].local[..., :2])]
        calls = ModuleCalls([RankReadings(cut, share)], {0: {}}, N, golden)
        found = divide_formula(named, "layer", calls, SHARDS)
        assert found is not None
        return found.formula

    assert divide("input").what == "sum"
    assert divide("output") is named.formula  # three ranks cannot divide five features
    assert divide_formula(named, "layer", ModuleCalls(), Shards()) is named


def test_each_way_of_what_ranks_divide_has_words() -> None:
    for change in (*SHARDS.list_sums(), *SHARDS.list_slices("given"), *SHARDS.list_slices("result")):
        assert describe_variant("linear-layer", [change]).startswith("computes with")
