"""Parameters that a module stores under another name and in another shape."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from moeverify.parallel.regions.local_shard import _unstack, parameters
from moeverify.parallel.regions.region import Region

E, F, H = 4, 3, 5


class Stored(NamedTuple):
    name: str
    rows: int = 0
    is_transposed: bool = False


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(E * F * H, dtype=torch.float64).view(E * F, H))
        self.z = nn.Parameter(torch.zeros(E * F, H))
        self.r = nn.Linear(H, E, bias=False)
        self.plain = nn.Parameter(torch.zeros(2))
        self.stored_as = {
            "w": Stored("experts.up", F),
            "z": Stored("experts.down", F, is_transposed=True),
            "r.weight": Stored("router.weight"),
        }


def test_names_and_shapes_are_those_of_the_model() -> None:
    held = {holding.name: holding for holding in parameters(nn.ModuleDict({"moe": Stacked()}))}
    assert set(held) == {"moe.experts.up", "moe.experts.down", "moe.router.weight", "moe.plain"}
    assert held["moe.experts.up"].region == Region.whole((E, F, H))
    assert held["moe.experts.down"].region == Region.whole((E, H, F))
    assert held["moe.router.weight"].local().shape == (E, H)


def test_values_are_seen_and_written_through_the_view() -> None:
    model = nn.ModuleDict({"moe": Stacked()})
    held = {holding.name: holding for holding in parameters(model)}
    up, down = held["moe.experts.up"], held["moe.experts.down"]
    assert up.local()[2, 1, 3] == (2 * F + 1) * H + 3
    down.local()[1, 4, 2] = 7.0
    assert model["moe"].z[1 * F + 2, 4] == 7.0
    moment = torch.zeros(E * F, H)
    assert down.local(moment).shape == (E, H, F)
    assert down.local(torch.tensor(3.0)) == 3.0  # a step counter has no shape to change


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_shard_of_whole_experts_has_a_place(is_transposed) -> None:
    region = Region.box((E * F, H), [range(F, 3 * F), range(H)])
    shape = (E, H, F) if is_transposed else (E, F, H)
    found = _unstack(region, Stored("w", F, is_transposed))
    assert found == Region.box(shape, [range(1, 3), range(shape[1]), range(shape[2])])


def test_a_shard_that_ends_within_an_expert_is_refused() -> None:
    with pytest.raises(ValueError, match="not whole experts of 3 rows"):
        _unstack(Region.box((E * F, H), [range(4), range(H)]), Stored("w", F))
