"""FSDP2 with a gradient divide factor over a shard group of one rank, for a gradient of 1. torch alone.

Exits with 1 when a dtype divides by anything but the factor, with 0 when all divide by it.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29532")
dist.init_process_group("gloo", rank=0, world_size=1)
print("torch", torch.__version__)
wrong = False
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    model = nn.Linear(4, 4, bias=False, dtype=dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.set_gradient_divide_factor(8.0)
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    actual = model.weight.grad.to_local()[0, 0].item()
    print(f"{dtype}: gradient 1 divided by 8: expected {1 / 8} actual {actual}")
    wrong |= actual != 1 / 8
dist.destroy_process_group()
sys.exit(int(wrong))
