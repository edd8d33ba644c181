"""Cost of `moeverify watch --guard` per step, in time and memory: steps with and without it, in one run.

python benchmarks/guard_overhead.py --width 256
torchrun --nproc-per-node 2 benchmarks/guard_overhead.py --width 2048 --layers 8 --tokens 65536

With torchrun the model is sharded by FSDP2. On a GPU it computes in bfloat16. One process on a CPU is
measured in CPU seconds, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from output import print_setting, print_table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from watch_overhead import VOCABULARY, Block

from moeverify.scripts.guard.settings import GuardSettings
from moeverify.scripts.guard.start import start

EVERY = 16
LENGTH = 512
WITHOUT, BETWEEN, WITHIN = "without", "between samples", "in samples"


def main() -> None:
    """Train, and print medians of steps without a guard, between its samples, and in them."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=2048, help="of each rank, in one step")
    arguments.add_argument("--micro-batches", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, count = build(options.width, options.layers, device, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, list[int]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        guard = start(GuardSettings(out=Path(folder), every=EVERY).model_dump_json(), str(rank), str(world))
        for number in range(8 + 2 * EVERY * options.rounds):
            # Every second step is unguarded: both kinds see the same load of the machine.
            guard.switch(on=number % 2 == 0)
            is_sampled = guard.settings.samples(guard.step + 1)
            tokens = torch.randint(VOCABULARY, (options.tokens // LENGTH, LENGTH + 1), device=device)
            reset_peak(device)
            clock = time.process_time if (device.type, world) == ("cpu", 1) else time.perf_counter
            started = clock()
            train_step(model, optimizer, tokens, options.micro_batches)
            synchronize(device)
            kind = WITHOUT if number % 2 else WITHIN if is_sampled else BETWEEN
            if number > 7:
                seconds[kind].append(clock() - started)
                peaks[kind].append(read_peak(device))
        guard.switch(on=False)
    if rank == 0:
        report(options, count, device, world, seconds, peaks)
    if world > 1:
        dist.destroy_process_group()


def build(width: int, layers: int, device: torch.device, world: int) -> tuple[nn.Module, int]:
    """Return the model, sharded over the ranks, and the number of its parameters."""
    torch.manual_seed(0)
    with device:
        blocks = [Block(width) for _ in range(layers)]
        head = nn.Linear(width, VOCABULARY, bias=False)
        model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, head)
    count = sum(parameter.numel() for parameter in model.parameters())
    if world > 1:
        mesh = init_device_mesh(device.type, (world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, count


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, parts: int) -> None:
    """Make one optimizer step. Shape: tokens (rows, LENGTH + 1)."""
    for part in tokens.chunk(parts):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / parts
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Wait for a GPU, and reset its memory peak."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read_peak(device: torch.device) -> int:
    """Return the peak of a GPU's memory in bytes, 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def report(
    options: argparse.Namespace,
    count: int,
    device: torch.device,
    world: int,
    seconds: dict[str, list[float]],
    peaks: dict[str, list[int]],
) -> None:
    """Print the medians, and their mean over sampled and other steps relative to a step without a guard."""
    print_setting()
    base, peak = statistics.median(seconds[WITHOUT]), max(peaks[WITHOUT])
    rows = []
    for kind in (WITHOUT, BETWEEN, WITHIN):
        median = statistics.median(seconds[kind])
        memory = (
            f"{max(peaks[kind]) / 2**30:.3f} GiB, {100 * (max(peaks[kind]) / peak - 1):+.2f} %"
            if peak
            else "-"
        )
        rows.append([kind, len(seconds[kind]), f"{1000 * median:.1f}", f"{median / base:.3f}", memory])
    share = 2 / EVERY  # two of each EVERY steps are sampled, after the first four
    mean = statistics.median(seconds[WITHIN]) * share + statistics.median(seconds[BETWEEN]) * (1 - share)
    rows.append(["mean, guarded", "", f"{1000 * mean:.1f}", f"{mean / base:.3f}", ""])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = f"{count / 1e6:.1f} million parameters, {options.tokens} tokens a rank, {world} ranks, {name}"
    print_table(["steps", "number", "ms", "times", "peak memory"], rows, title)


if __name__ == "__main__":
    main()
