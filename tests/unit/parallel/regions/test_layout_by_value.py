"""Places of plain tensors from their values: sharded, packed, transposed and fused tensors are recognized."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeverify.parallel.regions.by_value import Unplaced, find_namesake, place_by_value, place_region
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region

SHAPES = {"up": (6, 8), "down": (8, 6), "experts": (4, 6, 8), "bias": (12,)}


def draw(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


WHOLE = draw()


def find(tensors: dict[str, Tensor], whole: dict[str, Tensor] = WHOLE) -> list[LocalShard]:
    shards, unplaced = place_by_value(tensors, whole)
    assert unplaced == []
    for shard in shards:  # a shard describes the values that the rank stores
        assert torch.equal(shard.local(), shard.region.take(whole[shard.name]))
    return shards


@st.composite
def boxes(draw_: st.DrawFn) -> Region:
    """Return any box of a tensor: indices of every dim in any order, with gaps."""
    shape = SHAPES[draw_(st.sampled_from(sorted(SHAPES)))]
    dims = [
        draw_(st.lists(st.integers(0, size - 1), min_size=min(2, size), max_size=size, unique=True))
        for size in shape
    ]
    return Region.box(shape, dims)


@given(boxes(), st.booleans(), st.sampled_from([torch.float64, torch.float32]))
@settings(max_examples=120, deadline=None)
def test_any_box_is_found_also_transposed(region: Region, transposed: bool, dtype: torch.dtype) -> None:
    whole = draw(dtype)
    name = next(name for name, shape in SHAPES.items() if shape == region.shape)
    local = region.take(whole[name]).clone()
    if transposed and local.ndim == 2:
        local = local.t().contiguous()
    (shard,) = find({"some.name": local}, whole)
    assert (shard.name, shard.region) == (name, region)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_run_of_a_flat_buffer_is_found(data: st.DataObject) -> None:
    names = data.draw(st.permutations(sorted(SHAPES)))
    padding = data.draw(st.integers(0, 5))
    flat = torch.cat([WHOLE[name].reshape(-1) for name in names])
    start = data.draw(st.integers(0, flat.numel() - 2))
    stop = data.draw(st.integers(start + 2, flat.numel()))
    buffer = torch.cat([flat[start:stop], torch.zeros(padding, dtype=torch.float64)])
    shards, unplaced = place_by_value({"buffer": buffer}, WHOLE)
    edges = {sum(math.prod(SHAPES[name]) for name in names[:number]) for number in range(len(names) + 1)}
    if {start + 1, stop - 1} & edges:
        return  # one edge element may be elsewhere in a line of one
    assert unplaced == []
    assert sum(shard.region.numel for shard in shards) == stop - start
    for shard in shards:
        assert torch.equal(shard.local().reshape(-1), shard.region.take(WHOLE[shard.name]).reshape(-1))


@pytest.mark.parametrize("rank", [0, 1])
def test_packed_gate_and_up_of_a_tensor_parallel_rank(rank: int) -> None:
    gate, up = WHOLE["down"][:4], WHOLE["down"][4:]
    local = torch.cat([gate[2 * rank : 2 * rank + 2], up[2 * rank : 2 * rank + 2]])
    (shard,) = find({"mlp.gate_up": local})
    first = 2 * rank
    assert shard.region.dims == ((first, first + 1, first + 4, first + 5), range(6))


def test_experts_that_every_rank_numbers_from_zero() -> None:
    whole = {f"experts.{number}.w": WHOLE["experts"][number] for number in range(4)}
    shards = find({"experts.0.w": whole["experts.2.w"], "experts.1.w": whole["experts.3.w"]}, whole)
    assert [shard.name for shard in shards] == ["experts.2.w", "experts.3.w"]


@pytest.mark.parametrize("transposed", [False, True])
def test_an_expert_of_a_stack_that_a_rank_keeps_alone(transposed: bool) -> None:
    local = WHOLE["experts"][2].t().contiguous() if transposed else WHOLE["experts"][2]
    (shard,) = find({"experts.0.weight": local})
    assert (shard.name, shard.region.dims) == ("experts", (range(2, 3), range(6), range(8)))


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_a_rank_as_rows_of_one_matrix(transposed: bool) -> None:
    own = WHOLE["experts"][2:4]
    local = (own.transpose(1, 2) if transposed else own).reshape(-1, 6 if transposed else 8)
    (shard,) = find({"experts.w1": local.contiguous()})
    assert (shard.name, shard.region.dims[0]) == ("experts", range(2, 4))


def test_fused_projections_are_compared_under_the_names_of_the_golden() -> None:
    whole = {name: torch.randn(4, 6, dtype=torch.float64) for name in ("q", "k", "v")}
    fused = torch.cat([whole["q"][2:], whole["k"][2:], whole["v"][2:]])
    shards = find({"qkv": fused}, whole)
    assert [(shard.name, shard.region.dims[0]) for shard in shards] == [
        ("q", range(2, 4)),
        ("k", range(2, 4)),
        ("v", range(2, 4)),
    ]
    gradient = torch.arange(36.0, dtype=torch.float64).reshape(6, 6)
    assert torch.equal(shards[1].local(gradient), gradient[2:4])  # of a gradient the same rows


def test_equal_values_belong_to_the_tensor_of_their_own_name() -> None:
    whole = {"one.norm": torch.ones(8), "two.norm": torch.ones(8)}
    shards = find(dict(whole), whole)
    assert [shard.name for shard in shards] == ["one.norm", "two.norm"]


SQUARE = torch.arange(9.0).reshape(3, 3)
OTHER_SHAPES = {
    "transposed": (SQUARE.t().contiguous(), SQUARE),
    "in another order of dims": (WHOLE["experts"].permute(2, 0, 1).contiguous(), WHOLE["experts"]),
    "as a slice of a stack": (torch.stack([SQUARE + 10, SQUARE]), SQUARE),
    "as rows of one matrix": (torch.stack([SQUARE, SQUARE + 10]), torch.cat([SQUARE, SQUARE + 10])),
}


@pytest.mark.parametrize("case", OTHER_SHAPES)
def test_the_own_name_does_not_outweigh_values_that_stand_elsewhere_as_they_are(case: str) -> None:
    own, local = OTHER_SHAPES[case]
    whole = {"own": own, "other": local.clone()}
    shards, unplaced = place_by_value({"own": local}, whole)
    assert (shards, [each.candidates for each in unplaced]) == ([], [("own", "other")])
    for name in whole:  # a declaration settles it
        (shard,), unplaced = place_by_value({"own": local}, whole, names={"own": name})
        assert (shard.name, unplaced) == (name, [])
    # Without the other it is its own, also if both would need the same change.
    assert [shard.name for shard in find({"own": local}, {"own": own})] == ["own"]
    assert [shard.name for shard in find({"own": local}, {"own": own, "other": own.clone()})] == ["own"]


def test_what_is_ambiguous_is_reported_and_a_declaration_settles_it() -> None:
    whole = {"one.norm": torch.ones(8), "two.norm": torch.ones(8)}
    shards, unplaced = place_by_value({"norm": torch.ones(8), "half": torch.ones(4)}, whole)
    assert shards == []
    assert [(each.name, each.candidates) for each in unplaced] == [
        ("norm", ("one.norm", "two.norm")),
        ("half", ("one.norm", "two.norm")),
    ]
    half = Region.box((8,), [range(4, 8)])
    declared = place_by_value(
        {"norm": torch.ones(8), "half": torch.ones(4)},
        whole,
        names={"norm": "two.norm", "half": "one.norm"},
        regions={"half": half},
    )
    assert [(shard.name, shard.region) for shard in declared[0]] == [
        ("two.norm", Region.whole((8,))),
        ("one.norm", half),
    ]
    assert declared[1] == []


def test_values_that_stand_nowhere() -> None:
    strange = torch.randn(6, 8, dtype=torch.float64)
    shards, unplaced = place_by_value({"adapter": strange}, WHOLE)
    assert shards == []
    assert (unplaced[0].name, unplaced[0].candidates) == ("adapter", ())
    # With a parameter's own name and shape it is that parameter: a comparison reports wrong values.
    (shard,), unplaced = place_by_value({"up": strange}, WHOLE)
    assert (shard.name, shard.region.is_whole, unplaced) == ("up", True, [])


def test_one_wrong_value_is_not_taken_for_a_place() -> None:
    local = WHOLE["up"][2:4].clone()
    local[1, 3] += 1e-9
    assert place_by_value({"part": local}, WHOLE)[0] == []


NORMS = ("0.attention.q_norm.weight", "0.attention.k_norm.weight", "0.mlp_norm.weight")


def draw_norms(size: int = 16) -> dict[str, Tensor]:
    """Return norms near 1, of which bfloat16 leaves a few values."""
    generator = torch.Generator().manual_seed(0)
    return {name: (1 + 0.02 * torch.randn(size, generator=generator)).bfloat16() for name in NORMS}


@pytest.mark.parametrize("suffix", ["_shard", "_local", ""])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("prefix", ["", "own_"])
def test_rounded_values_that_stand_in_several_parameters(prefix: str, suffix: str, size: int) -> None:
    whole = draw_norms()
    for name, values in whole.items():
        module, _, last = name.rpartition(".")
        for start in range(0, 16, size):
            local = {f"{module}.{prefix}{last}{suffix}": values[start : start + size].clone()}
            shards, unplaced = place_by_value(local, whole)
            # The position among equal elements cannot be determined, but the parameter can.
            assert {shard.name for shard in shards} <= {name}
            assert all(shard.region == Region.box((16,), [range(start, start + size)]) for shard in shards)
            assert {each.candidates for each in unplaced} <= {(name,)}
            assert bool(shards) or size < 4


def test_what_no_name_settles_stays_ambiguous() -> None:
    one, two = draw_norms(2).values(), draw_norms(2).values()
    whole = dict(zip(["a.weight", "b.weight", "c.weight", "d.weight"], [*one, *two], strict=False))
    whole["d.weight"] = whole["a.weight"].clone()
    shards, unplaced = place_by_value({"e.weight_shard": whole["a.weight"].clone()}, whole)
    assert (shards, [each.candidates for each in unplaced]) == ([], [("a.weight", "d.weight")])


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("a.weight_shard", ["a.weight", "b.weight"], "a.weight"),
        ("a._weight", ["a.weight", "a.bias"], "a.weight"),
        ("a.weight_norm_grid", ["a.weight", "a.weight_norm"], "a.weight_norm"),
        ("a.weight", ["a.weight", "a.w"], "a.weight"),
        ("a.scale", ["a.weight"], None),
        ("weight_shard", ["a.weight"], None),
    ],
)
def test_names_that_mean_a_parameter(name: str, names: list[str], expected: str | None) -> None:
    assert find_namesake(name, names) == expected


def make_part(name: str, of: Tensor, rows: range) -> LocalShard:
    """Return rows of a matrix under another name."""
    region = Region.box(of.shape, [rows, range(of.shape[1])])
    return LocalShard(name, region.take(of).clone(), region)


def test_a_known_region_says_which_parameter_a_renamed_tensor_is() -> None:
    whole = {"a.weight": WHOLE["up"], "b.weight": WHOLE["up"] + 1.0, "c.weight": WHOLE["down"]}
    for rows in (range(3), range(3, 6)):
        placed = place_region(make_part("b.grid", whole["b.weight"], rows), whole)
        assert isinstance(placed, LocalShard)
        assert (placed.name, placed.region.dims[0]) == ("b.weight", rows)
    moved = make_part(
        "b.grid", whole["b.weight"], range(3)
    )  # the values of other rows are not those of its region
    other = LocalShard("b.grid", whole["b.weight"][3:].clone(), moved.region)
    assert place_region(other, whole) is None


def test_values_of_several_parameters_at_a_known_region() -> None:
    whole = {"a.weight": WHOLE["up"], "b.weight": WHOLE["up"].clone()}
    placed = place_region(make_part("b.weight_grid", whole["b.weight"], range(3)), whole)
    assert isinstance(placed, LocalShard)
    assert placed.name == "b.weight"
    placed = place_region(make_part("c.weight_grid", whole["b.weight"], range(3)), whole)
    assert isinstance(placed, Unplaced)
    assert placed.candidates == ("a.weight", "b.weight")


def test_wrong_values_at_a_known_region_are_those_of_the_nearest_name() -> None:
    whole = {"a.weight": WHOLE["up"], "b.weight": WHOLE["up"].clone()}
    wrong = make_part("b.weight_grid", WHOLE["up"] + 1.0, range(3))
    placed = place_region(wrong, whole)
    assert isinstance(placed, LocalShard)
    assert placed.name == "b.weight"
    assert place_region(wrong, whole, taken=["b.weight"]) is None


def test_a_rank_that_has_nothing_of_a_renamed_parameter() -> None:
    whole = {"a.weight": WHOLE["up"], "b.weight": WHOLE["up"] + 1.0}
    for name in ("b.weight_grid", "b.other"):
        placed = place_region(make_part(name, whole["b.weight"], range(0)), whole, taken=["a.weight"])
        assert isinstance(placed, LocalShard)
        assert placed.name == "b.weight"
