"""What saving and loading a checkpoint costs beside torch's own distributed checkpoint and safetensors alone.

    python benchmarks/checkpoint.py [--gigabytes 2.2] [--rounds 2] [--folder DIR]

Two ranks hold halves of float32 tensors of 16 MiB each. The methods take turns, so other load on the
machine affects all alike. `moeverify` writes a checksum of each part, the manifest, and one rename. `dcp`
uses DTensors with torch's default writer and reader. `safetensors` writes one synced file per rank, and
reads with `load_file` and a copy into the tensors. `background` is moeverify's asynchronous save: the time
until training may continue, and the time until the checkpoint is complete. Each method runs in separate
processes, forked from ranks that have imported everything and hold the tensors. Before a load the files
leave the page cache, so they come from the disk. Wall seconds are those of the slower rank, CPU seconds
(user and system) are the sum of both. Memory is a rank's peak growth, including mapped pages of files. All
numbers are medians of the rounds.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from output import print_setting, print_table

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 2
ROWS, COLUMNS = 2048, 2048  # 16 MiB
WAYS = ("moeverify", "dcp", "safetensors")


def make_tensors(gigabytes, rank):
    """Return this rank's half of each tensor by name."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    number = max(1, round(gigabytes * 1e9 / (ROWS * COLUMNS * 4)))
    return {
        f"layers.{n}.weight": torch.randn(ROWS // NUM_RANKS, COLUMNS, generator=generator)
        for n in range(number)
    }


def hold(tensors, rank):
    """Return the tensors in moeverify's form."""
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.parallel.regions.region import Region

    size = ROWS // NUM_RANKS
    region = Region.box((ROWS, COLUMNS), [range(rank * size, (rank + 1) * size), range(COLUMNS)])
    return [LocalShard(name, tensor, region) for name, tensor in tensors.items()]


def distribute(tensors):
    """Return the tensors in the form of torch's distributed checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}


def save(way, folder, tensors, rank):
    """Save, and return the seconds until training may continue if that is before the end."""
    if way in ("moeverify", "background"):
        import torch.distributed as dist

        from moeverify.tools.checkpoint.save import save, save_async

        if way == "moeverify":
            save(folder, hold(tensors, rank), {})
            return None
        begun = time.monotonic()
        saving = save_async(folder, hold(tensors, rank), {}, dist.new_group(backend="gloo"))
        free = time.monotonic() - begun
        saving.wait()
        return free
    if way == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save(distribute(tensors), checkpoint_id=folder)
        return None
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.safetensors"
    save_file(tensors, path)
    sync(path)
    return None


def sync(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def load(way, folder, tensors, rank):
    """Fill the tensors from the checkpoint."""
    if way == "moeverify":
        from moeverify.tools.checkpoint.load import load

        load(folder, hold(tensors, rank))
    elif way == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.load(distribute(tensors), checkpoint_id=folder)
    else:
        from safetensors.torch import load_file

        for name, values in load_file(folder / f"rank-{rank}.safetensors").items():
            tensors[name].copy_(values)


def read_memory(key):
    """Return a number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def act(what, way, folder, store, tensors, rank):
    """Save or load in this process and return the cost."""
    import torch.distributed as dist

    wanted = {name: float(tensor.sum()) for name, tensor in tensors.items()}
    if what == "load":
        for tensor in tensors.values():
            tensor.zero_()  # from here on these are this process's own pages
    dist.init_process_group("gloo", f"file://{store}", world_size=NUM_RANKS, rank=rank)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    before, begun, cpu = read_memory("VmRSS"), time.monotonic(), os.times()
    free = (save if what == "save" else load)(way, folder, tensors, rank)
    if way == "safetensors":
        dist.barrier()  # a checkpoint is complete when all ranks are done
    now = os.times()
    taken = {
        "wall": time.monotonic() - begun,
        "cpu": now.user + now.system - cpu.user - cpu.system,
        "grown": read_memory("VmHWM") - before,
        "free": free,
    }
    if {name: float(tensor.sum()) for name, tensor in tensors.items()} != wanted:
        raise SystemExit(f"{way}: not what was saved was loaded")
    return taken


def serve_rank(rank, gigabytes):
    """Execute each line of stdin in a forked child, and write the result to stdout."""
    import safetensors.torch  # noqa: F401
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # so that no child spends its time on imports

    import moeverify.tools.checkpoint.load
    import moeverify.tools.checkpoint.save  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # warms up the imports at first use
        for what in (torch.distributed.checkpoint.save, torch.distributed.checkpoint.load):
            what({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    tensors = make_tensors(gigabytes, rank)
    for line in sys.stdin:
        what, way, folder, store = json.loads(line)
        answer, question = os.pipe()
        if os.fork() == 0:
            taken = act(what, way, Path(folder), store, tensors, rank)
            os.write(question, json.dumps(taken).encode())
            os._exit(0)
        os.close(question)
        with os.fdopen(answer) as pipe:
            print(pipe.read() or '"failed"', flush=True)
        os.wait()


def forget(folder):
    """Drop the files of a folder from the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def ask(ranks, *request):
    """Return the cost of both ranks together."""
    for rank in ranks:
        rank.stdin.write(json.dumps(request) + "\n")
        rank.stdin.flush()
    shown = [json.loads(rank.stdout.readline()) for rank in ranks]
    if "failed" in shown:
        raise SystemExit(f"failed: {request}")
    return {
        "wall": max(each["wall"] for each in shown),
        "cpu": sum(each["cpu"] for each in shown),
        "grown": max(each["grown"] for each in shown),
        "free": max((each["free"] or 0.0) for each in shown),
    }


def measure(folder, gigabytes, rounds):
    """Print the table."""
    command = [sys.executable, __file__, "--gigabytes", str(gigabytes), "--rank"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        for rank in range(NUM_RANKS)
    ]
    taken = {}
    try:
        for number in range(rounds):
            for way in (*WAYS, "background"):
                place = folder / f"{way}-{number}"
                steps = [("save", way)] if way == "background" else [("save", way), ("load", way)]
                for what, which in steps:
                    if what == "load":
                        forget(place)
                    found = ask(ranks, what, which, str(place), str(folder / f"store-{what}-{place.name}"))
                    taken.setdefault((what, which), []).append(found)
                    print(f"  {number} {what} {which} {found}", file=sys.stderr, flush=True)
                shutil.rmtree(place)
    finally:
        for rank in ranks:
            rank.stdin.close()
            rank.wait()
    show(taken, gigabytes, rounds)


def show(taken, gigabytes, rounds):
    rows = []
    for (what, way), found in taken.items():
        middle = {key: statistics.median(each[key] for each in found) for key in ("wall", "cpu", "free")}
        base = {key: statistics.median(each[key] for each in taken[what, "dcp"]) for key in ("wall", "cpu")}
        waits = middle["free"] if way == "background" else middle["wall"]
        rows.append(
            (
                f"{what} {way}",
                f"{middle['wall']:.2f}",
                f"{gigabytes * 1e3 / middle['wall']:.0f}",
                f"{middle['wall'] / base['wall']:.2f}",
                f"{middle['cpu']:.2f}",
                f"{middle['cpu'] / base['cpu']:.2f}",
                f"{max(each['grown'] for each in found) / 1e6:.0f}",
                f"{waits:.2f}",
            )
        )
    headers = ("way", "wall s", "MB/s", "of dcp", "CPU s", "of dcp", "memory MB", "training waits s")
    print_table(headers, rows, f"{gigabytes:.1f} GB, {NUM_RANKS} ranks, {rounds} rounds:")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.rank is not None:
        serve_rank(options.rank, options.gigabytes)
        return
    print_setting()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), options.gigabytes, options.rounds)


if __name__ == "__main__":
    main()
