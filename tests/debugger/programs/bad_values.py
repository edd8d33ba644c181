"""A small model that each rank trains alone. Rank 1's value goes bad at the place named by the argument."""

import os
import sys
import time
from pathlib import Path

import torch

from multiprocessing_pdb import MultiprocessingPdb, stop, stop_all

Tra = MultiprocessingPdb().set_trace
WHERE = sys.argv[1]
IS_BAD = os.environ["RANK"] == "1"


class Scale(torch.nn.Module):
    """Multiply the input; on the bad rank multiply by NaN in the third step."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, value):
        self.calls += 1
        if IS_BAD and WHERE == "forward" and self.calls == 3:
            return value * torch.tensor([1.0, float("nan"), 1.0, 1.0])
        if IS_BAD and WHERE == "backward" and self.calls == 3:
            return torch.sqrt(value * 0.0)  # finite, with an infinite derivative
        return value * 2


def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scale(), torch.nn.Linear(4, 1))
    hooks = Tra.on_nan(model)
    losses = []
    for step in range(4):
        model.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        losses.append(loss.item())
        if WHERE == "api" and step == 2:
            expected = "mine"
            if IS_BAD:
                while len(list(Path(os.environ["MPDB_DIR"]).glob("*.control"))) < 2:
                    time.sleep(0.01)  # the other rank is not armed yet
                sys.stdout.write(f"asked {stop_all('rank 1 has a finding')}\n")
                stop("loss differs", frame_locals={"expected": torch.ones(2), "actual": torch.zeros(2)})
            assert expected == "mine"
            assert "actual" not in locals()
    hooks.remove()
    sys.stdout.write(f"losses {losses}\n")


train()
if WHERE == "api" and not IS_BAD:
    while not Path("go").exists():
        time.sleep(0.01)
