"""Gathered weights on a GPU: comparisons never make the host wait for the device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moeverify.verification.checks.gathered_weights import GatheredWatch


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_a_gpu_while_it_trains() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        spoiled: list[int] = []

        def spoil(module: nn.Module, inputs: object) -> None:
            if spoiled:
                module.get_parameter("weight").data.mul_(2.0)

        # After FSDP has gathered, and before the comparison.
        model[0].register_forward_pre_hook(spoil)
        watch, x = GatheredWatch(model), torch.ones(2, 16, device="cuda")
        for step in range(4):
            # The first step computes the positions of the compared elements.
            torch.cuda.set_sync_debug_mode("default" if step == 0 else "error")
            watch.begin_step(step)
            # A result is read as soon as it has arrived, and that waits.
            spoiled[:] = [step] if step == 3 else []
            model(x)
        torch.cuda.set_sync_debug_mode("default")
        watch.close()
        found = {(each.parameter, each.step) for each in watch.report().differences}
        assert found == {("0.weight", 3)}
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
