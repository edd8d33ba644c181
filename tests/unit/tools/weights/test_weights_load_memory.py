"""A load needs little memory beyond the tensors that it fills, for checkpoints of any size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path

import torch

from moeverify.tools.checkpoint.load import load
from moeverify.tools.checkpoint.save import save
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


tensors = [torch.full((2048, 2048), float(number + 1)) for number in range(24)]  # 16 MiB each
held = [LocalShard(f"weight/{number}", tensor, Region.whole(tensor.shape)) for number, tensor in enumerate(tensors)]
save(Path(sys.argv[1]) / "small", [LocalShard("weight/x", torch.ones(3), Region.whole((3,)))], {})
load(Path(sys.argv[1]) / "small", [LocalShard("weight/x", torch.ones(3), Region.whole((3,)))])
before = peak()
save(Path(sys.argv[1]) / "large", held, {})
saved = peak()
for tensor in tensors:
    tensor.zero_()
load(Path(sys.argv[1]) / "large", held)
assert all(float(tensor[0, 0]) == number + 1 for number, tensor in enumerate(tensors))
print(saved - before, peak() - saved)
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_a_save_and_a_load_need_a_part_of_the_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    saving, loading = map(int, done.stdout.split())
    assert saving < 100 * 2**20  # of 384 MiB
    assert loading < 160 * 2**20
