"""A script to watch: it prints step times before, in and after the recorded steps 5 to 9, and its memory.

On a CPU these are CPU seconds, which other work on the machine changes little. Disk writes count only as
far as they keep the processor busy.

python benchmarks/watch_overhead.py --width 512
moeverify watch --steps 5-9 --out runs/overhead -- python benchmarks/watch_overhead.py --width 512
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 8192


class Block(nn.Module):
    """A gated MLP with four experts; each token passes through two of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus the output of its experts. Shape: (B, S, width)."""
        flat = self.norm(x).reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, down(F.silu(up(flat[rows]))) * weights[rows, places, None])
        return x + out.reshape(x.shape)


def main() -> None:
    """Train and print the medians."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--rows", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--json", type=Path, help="a file for the numbers")
    options = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    blocks = [Block(options.width) for _ in range(options.layers)]
    head = nn.Linear(options.width, VOCABULARY, bias=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, options.width), *blocks, head).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds: list[float] = []
    for _ in range(options.steps):
        tokens = torch.randint(VOCABULARY, (options.rows, 513), device=device)
        started = read_clock(device)
        for part in tokens.chunk(2):
            logits = model(part[:, :-1])
            (F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(read_clock(device) - started)
    number = sum(parameter.numel() for parameter in model.parameters())
    spans = {"before": seconds[1:5], "in": seconds[5:10], "after": seconds[10:]}
    found = {name: statistics.median(each) for name, each in spans.items()}
    found |= {"parameters": number, "peak": read_peak(device)}
    line = ", ".join(f"{name} {1000 * found[name]:.2f} ms" for name in spans)
    print(f"{number / 1e6:.1f} million parameters on {device}: {line}, peak {found['peak'] / 2**30:.2f} GiB")
    if options.json:
        options.json.write_text(json.dumps(found))


def read_clock(device: str) -> float:
    """Return seconds: wall time on a GPU, else CPU time."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def read_peak(device: str) -> int:
    """Return the peak memory of the GPU, or of the process. Units: bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
