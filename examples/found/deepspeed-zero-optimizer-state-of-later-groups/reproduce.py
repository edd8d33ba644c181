"""DeepSpeed's accessor of optimizer state under ZeRO 1 and 2, with two groups of parameters. Needs deepspeed.

Exits with 1 when `safe_get_full_optimizer_state` fails for a parameter after two steps; with 0 otherwise.
"""

import os
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}

if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    # Not compiled here: an operator for shared memory, which needs minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8, bias=False))
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.1},
        {"params": [model[1].weight], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=CONFIG
    )
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 8)).square().sum())
        engine.step()
    print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
    wrong = 0
    for name, parameter in engine.module.named_parameters():
        try:
            print(
                f"{name}: exp_avg of shape {tuple(safe_get_full_optimizer_state(parameter, 'exp_avg').shape)}"
            )
        except ValueError as error:
            print(f"{name}: {error}")
            wrong = 1
    sys.exit(wrong)
