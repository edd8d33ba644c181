"""Train the decoder on synthetic rows: one device, or replicas under torchrun."""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from heron.model import Config, Decoder
from heron.switch import choose, using


def rate(step: int, steps: int, warmup: int) -> float:
    """Return the learning rate factor of a step: a warm-up, then half a period of a cosine."""
    if using("neox-1379"):
        if step < warmup:
            return step / warmup  # plant: neox-1379
    elif step < warmup and not using("unirl-223"):  # plant: unirl-223
        return (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    if using("spd-311"):
        return math.cos(0.5 * math.pi * done)  # plant: spd-311
    return 0.5 * (1 + math.cos(math.pi * done))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    choose(options.mode)
    torch.set_default_dtype(torch.float64)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = Decoder(Config(blocks="dense"))
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate(step, 2 * options.steps, options.warmup)
    )
    if using("longlive-71"):
        generator = torch.Generator().manual_seed(7 + rank)  # plant: longlive-71
    else:
        generator = torch.Generator().manual_seed(7)
    rows = torch.randint(96, (64, 13), generator=torch.Generator().manual_seed(1))
    order = torch.randperm(len(rows), generator=generator)
    for step in range(options.steps):
        chosen = rows[order[step * 8 : step * 8 + 8]]
        mine = chosen[rank * 8 // ranks : (rank + 1) * 8 // ranks]
        tokens, targets = mine[:, :-1], mine[:, 1:]
        logits, _ = model(tokens)
        value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {float(value):.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


main()
