"""What a conversion of weights costs against copying the same bytes, and how much memory it takes.

    python benchmarks/convert.py [--gigabytes 2.2] [--rounds 3] [--folder DIR]

Weights of Mixtral's shape, of about that size in bf16, are written in each format. The methods take turns,
so other load on the machine affects all alike. `cp` copies a folder file by file and syncs its output; each
conversion runs in a separate process. Before each, the input files leave the page cache, so they come from
the disk. Seconds are the medians of wall time without the start of Python. Memory is the peak growth of the
process, including mapped pages of files.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from output import print_setting, print_table

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ("hf", "dcp", "megablocks")
PAIRS = [(start, to) for start in FORMATS for to in FORMATS if start != to]
NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN = 8, 3584, 1024


def make_model(gigabytes):
    """Return a model of Mixtral's family of about this size in bf16."""
    from moeverify.cases.schema import MoE, ReferenceModel

    layer = 2 * (3 * NUM_EXPERTS * EXPERT_HIDDEN * HIDDEN + 4 * HIDDEN * HIDDEN)
    return ReferenceModel(
        vocab_size=32000,
        hidden=HIDDEN,
        num_layers=max(1, round(gigabytes * 1e9 / layer)),
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden=EXPERT_HIDDEN,
        moe=MoE(num_experts=NUM_EXPERTS, top_k=2, expert_hidden=EXPERT_HIDDEN),
    )


def write_weights(folder, gigabytes):
    """Write random weights in Hugging Face's format and return their bytes."""
    import torch

    from moeverify.tools.weights.description import Description, write_description
    from moeverify.tools.weights.huggingface import create_huggingface
    from moeverify.tools.weights.source import Spec, cut
    from moeverify.tools.weights.tensor_mapping import list_tensors

    described = Description(make_model(gigabytes))
    specs = {name: Spec(shape, torch.bfloat16) for name, shape in list_tensors(described.model).items()}
    folder.mkdir(parents=True)
    write_description(folder, "hf", described, "bfloat16")

    def read(piece):
        return torch.randn([len(indices) for indices in piece.box]).to(torch.bfloat16)

    create_huggingface(folder, described, specs, 5 * 10**9).write(cut(specs), read)
    return sum(spec.num_bytes for spec in specs.values())


def forget(folder):
    """Drop the files of a folder from the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def copy(start, to):
    """Return the seconds of `cp` and a sync of its output."""
    to.mkdir()
    begun = time.monotonic()
    subprocess.run(["cp", *map(str, start.iterdir()), str(to)], check=True)
    for path in to.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.monotonic() - begun


def run_conversion(start, to, kind):
    """Return the seconds of a conversion, and the memory growth of its process in bytes."""
    command = [sys.executable, __file__, "--convert", str(start), str(to), kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, grown = done.stdout.split()
    return float(seconds), int(grown)


def read_memory(key):
    """Return a number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def convert_here(start, to, kind):
    """Convert in this process, and print seconds and bytes."""
    from moeverify.tools.weights.stream import convert

    before, begun = read_memory("VmRSS"), time.monotonic()
    convert(Path(start), Path(to), kind)
    print(time.monotonic() - begun, read_memory("VmHWM") - before)


def measure(folder, gigabytes, rounds):
    """Print the table."""
    size = write_weights(folder / "hf", gigabytes)
    for kind in FORMATS[1:]:
        run_conversion(folder / "hf", folder / kind, kind)
    seconds = {name: [] for name in ["cp", *PAIRS]}
    grown = {pair: [] for pair in PAIRS}
    for _ in range(rounds):
        for name, taken in seconds.items():
            start, kind = (folder / "hf", "") if name == "cp" else (folder / name[0], name[1])
            forget(start)
            if name == "cp":
                taken.append(copy(start, folder / "out"))
            else:
                wall, more = run_conversion(start, folder / "out", kind)
                taken.append(wall)
                grown[name].append(more)
            shutil.rmtree(folder / "out")
    base = statistics.median(seconds["cp"])
    table = []
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        title = name if name == "cp" else f"{name[0]} to {name[1]}"
        memory = "" if name == "cp" else f"{max(grown[name]) / 1e6:.0f}"
        table.append((title, f"{middle:.1f}", f"{size / middle / 1e6:.0f}", f"{middle / base:.2f}", memory))
    headers = ("way", "seconds", "MB/s", "of cp", "memory MB")
    print_table(headers, table, f"{size / 1e9:.2f} GB, {rounds} rounds:")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.convert:
        convert_here(*options.convert)
        return
    print_setting()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), options.gigabytes, options.rounds)


if __name__ == "__main__":
    main()
