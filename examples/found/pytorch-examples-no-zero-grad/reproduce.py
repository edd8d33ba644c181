"""The loop of pytorch/examples' tensor parallelism example, on one device.

Run as `python reproduce.py EXAMPLES`, a checkout of pytorch/examples. The loop is read from
distributed/tensor_parallelism/tensor_parallel_example.py, and run on a model of the same sizes.
Exits with 1 when gradients grow from step to step; with 0 otherwise.
"""

import sys
from pathlib import Path

import torch
from torch import nn

print("torch", torch.__version__)
path = Path(sys.argv[1]) / "distributed/tensor_parallelism/tensor_parallel_example.py"
source = path.read_text()
loop = source[
    source.index("for i in range(num_iters):") : source.index(
        'rank_log(_rank, logger, "Tensor Parallel training comp'
    )
]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
seen = []


def log(rank, logger, text):
    seen.append(model[2].bias.grad[0].item())


names = {"torch": torch, "tp_model": model, "device_type": "cpu", "num_iters": 4, "rank_log": log}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
exec(loop, names | {"optimizer": optimizer, "_rank": 0, "logger": None})
print("gradient of the last bias, of which each batch of 20 rows gives 20:", *seen)
sys.exit(seen != [20.0] * 4)
