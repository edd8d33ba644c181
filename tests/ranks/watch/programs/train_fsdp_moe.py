"""Trains a small Qwen3-MoE in bfloat16 with float32 weights: under FSDP2, or by autocast on one device.

It does not use moeverify. The two ways to mix precisions round at different places: FSDP2 keeps the residual
stream in bfloat16, autocast in float32. `--bug` plants a bug.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from small_qwen import LENGTH, VOCABULARY, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROWS, STEPS = 8, 2


def main() -> None:
    """Train two steps of two micro-batches per rank."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--bug", choices=["none", "double", "half"], default="none")
    bug = arguments.parse_args().bug
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = make_model()
    computes = torch.autocast("cpu", torch.bfloat16)
    if world > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        computes = nullcontext()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = ROWS // 4
    for step in range(STEPS):
        batch = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        own = batch.chunk(world)[rank].split(rows)
        optimizer.zero_grad()
        for number, tokens in enumerate(own):
            with computes:
                loss = model(input_ids=tokens, labels=tokens).loss
            weight = 2.0 if bug == "double" else 0.5 if bug == "half" and number == 0 else 1.0
            (loss * weight / len(own)).backward()
        optimizer.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
