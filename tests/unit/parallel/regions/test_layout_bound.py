"""Names of a model that are bound to other tensors during training, and cases that only look similar."""

from __future__ import annotations

import torch
from torch import nn

from moeverify.parallel.regions.bound import BoundTensors, take_live
from moeverify.parallel.regions.local_shard import buffers, parameters


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("phases", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def test_what_is_bound_to_another_tensor_is_found_and_read() -> None:
    model = Counter()
    bound, shards, kept = BoundTensors(model), parameters(model), buffers(model)
    assert bound.find_rebound() == []
    model.average = model.average + 1.0
    model.phases = model.phases * 2.0
    model.scratch = model.scratch + 1.0  # no checkpoint has it
    model.norm.weight = nn.Parameter(torch.full((4,), 2.0))
    found = bound.find_rebound()
    assert {(each.name, each.is_buffer) for each in found} == {
        ("average", True),
        ("phases", True),
        ("norm.weight", False),
    }
    errors = {each.name: each.measure_error() for each in found}
    assert errors == {"average": 1.0, "phases": 0.5, "norm.weight": 0.5}
    live = {shard.name: shard for shard in take_live([*shards, *kept], found)}
    assert torch.equal(live["average"].local(), torch.ones(4))
    assert torch.equal(live["phases"].local(), torch.tensor([[2.0, 0.0]] * 4))
    assert live["norm.weight"].tensor is model.norm.weight
    assert live["head.weight"].tensor is model.head.weight
    assert torch.equal(kept[0].local(), torch.zeros(4))


def test_a_module_in_the_place_of_another_one_has_other_parameters() -> None:
    model = Counter()
    bound = BoundTensors(model)
    model.head = nn.Linear(4, 2)
    assert {each.name for each in bound.find_rebound()} == {"head.weight", "head.bias"}


def test_what_only_looks_like_another_tensor() -> None:
    model = Counter()
    bound = BoundTensors(model)
    with torch.no_grad():
        model.average.add_(1.0)
        model.norm.weight.mul_(2.0)
    model.norm.weight = model.norm.bias  # tied to another parameter of the model
    model.norm.bias = nn.Parameter(model.norm.bias.detach())  # the same memory
    model.head.weight = nn.Parameter(torch.zeros(4, 4))  # gathered: more than this rank's shard
    del model.head.bias
    assert bound.find_rebound() == []
