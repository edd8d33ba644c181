"""Adapters of DeepSpeed and megatron-core on tensors in the two frameworks' own formats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks import deepspeed_moe, megatron
from moeverify.stacks.deepspeed import PartitionedModel
from moeverify.stacks.framework import refuse_unknown_arguments
from moeverify.stacks.megatron_on_cpu import CudaIsCpu


def partition(model: nn.Module, num_ranks: int, rank: int) -> None:
    """Convert the parameters to ZeRO-3's form: a flat partition per rank, padded at the end."""
    for parameter in model.parameters():
        size = -(-parameter.numel() // num_ranks)
        padded = nn.functional.pad(
            parameter.detach().flatten(), (0, size * num_ranks - parameter.numel()), value=9.0
        )
        parameter.ds_numel, parameter.ds_shape = parameter.numel(), parameter.shape  # type: ignore[attr-defined]
        parameter.ds_tensor = padded[rank * size : (rank + 1) * size]  # type: ignore[attr-defined]
        parameter.ds_process_group = None  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_partitions_of_zero_3_together_are_every_parameter_once(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = nn.Linear(3, 5)
    found = {name: torch.full(value.shape, torch.nan) for name, value in whole.named_parameters()}
    for rank in range(num_ranks):
        divided = nn.Linear(3, 5)
        divided.load_state_dict(whole.state_dict())
        partition(divided, num_ranks, rank)
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        for shard in PartitionedModel(nn.Sequential(divided)).list_shards({}):
            shard.region.put(found[shard.name.removeprefix("0.")], shard.local())
    for name, value in whole.named_parameters():
        assert torch.equal(found[name], value)


def test_cuda_by_name_is_the_cpu_for_megatron() -> None:
    with CudaIsCpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_weight_of_megatron_is_shown_whole_from_the_ranges_of_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    owned = {parameter: {"param": SimpleNamespace(start=2, end=4)}}
    optimizer = SimpleNamespace(
        model_param_gbuf_map={parameter: None},
        _get_model_param_range_map=owned.__getitem__,
        data_parallel_group=None,
    )
    others = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 6.0])
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.add_(others))
    found = megatron._gather(optimizer, parameter, torch.tensor([3.0, 4.0]))
    assert torch.equal(found, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    elsewhere = nn.Parameter(torch.zeros(1))
    assert megatron._find_range(optimizer, elsewhere) is None


def test_experts_are_divided_only_where_the_model_can_be_made_again() -> None:
    with pytest.raises(CaseError) as error:
        deepspeed_moe.build_again(nn.Linear(2, 2), 2)
    (problem,) = error.value.problems
    assert problem.path == "layout.arguments.ep_size"
    assert "moeverify.stacks.deepspeed_moe:make" in problem.remedy


def test_each_rank_copies_the_experts_of_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_model(ep_size: int) -> nn.Module:
        experts = nn.Module()
        experts.deepspeed_experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(4 // ep_size)])
        experts.num_local_experts = 4 // ep_size  # type: ignore[assignment]
        return nn.ModuleDict({"experts": experts, "head": nn.Linear(2, 2)})

    whole: Any = make_model(1)
    whole.made_of = (make_model, {})
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    divided: Any = deepspeed_moe.build_again(whole, 2)
    expected = [each.weight for each in whole["experts"].deepspeed_experts][2:]
    actual = [each.weight for each in divided["experts"].deepspeed_experts]
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
    assert torch.equal(whole["head"].weight, divided["head"].weight)


def test_an_unknown_field_is_named_where_the_case_has_it() -> None:
    (problem,) = refuse_unknown_arguments(PartitionedModel, {"model_": 1}, path="recipe.model.arguments")
    assert problem.path == "recipe.model.arguments.model_"
