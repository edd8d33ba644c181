"""What `moeverify watch --guard` costs a step: blocks of steps with and without it, in one run.

python benchmarks/guard_overhead.py --width 256
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from watch_overhead import VOCABULARY, Block

from moeverify.guard.settings import GuardSettings
from moeverify.guard.start import start

EVERY = 16


def main() -> None:
    """Train on one device, and print the medians of steps without a guard, between samples, and in samples."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=2048)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    torch.manual_seed(0)
    blocks = [Block(options.width) for _ in range(options.layers)]
    head = nn.Linear(options.width, VOCABULARY, bias=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, options.width), *blocks, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds: dict[str, list[float]] = {"without": [], "between samples": [], "in samples": []}
    with tempfile.TemporaryDirectory() as folder:
        guard = start(GuardSettings(out=Path(folder), every=EVERY).model_dump_json())
        for number in range(4 + 2 * EVERY * options.rounds):
            # Every second step is not guarded: both kinds see the same load of the machine.
            guard.switch(on=number % 2 == 0)
            is_sampled = guard.settings.samples(guard.step + 1)
            started = time.perf_counter()
            tokens = torch.randint(VOCABULARY, (options.tokens // 512, 513))
            for part in tokens.chunk(2):
                logits = model(part[:, :-1])
                (F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            kind = "without" if not guard.is_active else "in samples" if is_sampled else "between samples"
            if number > 3:
                seconds[kind].append(time.perf_counter() - started)
        guard.switch(on=False)
    medians = {kind: statistics.median(each) for kind, each in seconds.items()}
    base, between, within = medians.values()
    share = 2 / EVERY
    mean = (within * share + between * (1 - share)) / base
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{count / 1e6:.1f} million parameters, {options.tokens} tokens: {1000 * base:.0f} ms without, "
        f"{between / base:.3f} times between samples, {within / base:.3f} in samples, {mean:.3f} on average"
    )


if __name__ == "__main__":
    main()
