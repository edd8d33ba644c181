"""A training script with DeepSpeed's engine, ZeRO stage 0, 1 or 2, on CPUs (`torchrun`, any number of ranks).

It does not use moeverify. docs/results/watch.md lists the results of `moeverify watch` on it.
"""

from __future__ import annotations

import argparse
import os
import sys

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HIDDEN, ROWS, LENGTH, MICRO_ROWS = 64, 32, 48, 8, 16, 2


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--stage", type=int, default=0)
    options = arguments.parse_args()
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, VOCABULARY)
    )
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": MICRO_ROWS,
        "gradient_accumulation_steps": ROWS // world // MICRO_ROWS,
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = torch.Generator().manual_seed(7)
    share = ROWS // world
    for step in range(2):
        batch = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=data)
        for part in batch[rank * share : (rank + 1) * share].split(MICRO_ROWS):
            logits = engine(part[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
        if rank == 0:
            sys.stdout.write(f"step {step} loss {loss.item():.7f}\n")


if __name__ == "__main__":
    main()
