"""Train the decoder for one short epoch: 40 rows, 16 of them in a step."""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mystack.model import make

ROWS, GLOBAL, MICRO = 40, 16, int(os.environ.get("MICRO", 16))
world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if world > 1 else 0
torch.manual_seed(5)
model = make()
data = torch.randint(0, 96, (ROWS, 13), generator=torch.Generator().manual_seed(1))
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
accumulation = GLOBAL // (MICRO * world)
normalize = os.environ.get("WINDOW", "actual")
for start in range(0, ROWS, GLOBAL):
    window = data[start : start + GLOBAL]
    mine = window.chunk(world)[rank]
    parts = mine.split(MICRO)
    if normalize == "actual":
        divisor = len(parts)
    else:
        divisor = accumulation  # plant: p49
    for part in parts:
        logits, _ = model(part[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        (loss / divisor).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), float(os.environ.get("CLIP", "1e9")))
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print("step", start // GLOBAL, float(loss))
if world > 1:
    dist.destroy_process_group()
