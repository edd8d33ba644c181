"""What this machine offers, as far as a process without torch can tell."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from moeverify.errors import MachineError

_BYTES_PER_RANK = 700 * 2**20  # torch imported, a tiny model trained: about 400 MiB, seen on Linux
# What a stored golden depends on, its noise too; the rest of the package only compares.
_ANSWER_PACKAGES = (
    "model",
    "train",
    "layout",
    "hashing.py",
    "golden",
    "compare/difference.py",
    "worker/propagation.py",
    "worker/golden.py",
)


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Return the device to run on: CUDA where there are GPUs, unless something else is wanted.

    Raises: MachineError where CUDA is wanted and there is no GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and count_gpus() == 0):
        return "cpu"
    if count_gpus() == 0:
        raise MachineError("this machine has no GPU that nvidia-smi can see; use --device cpu")
    return "cuda"


def count_gpus() -> int:
    """Return the number of GPUs that a rank could use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in {"", "-1"}])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def most_ranks(device: Literal["cpu", "cuda"]) -> tuple[int, str]:
    """Return how many ranks fit on this machine, and why not more."""
    if device == "cuda":
        count = count_gpus()
        return count, f"this machine has {count} GPUs"
    free = _available_memory()
    if free is None:
        return 64, "at most 64 ranks on a CPU"
    count = max(1, free // _BYTES_PER_RANK)
    return (
        count,
        f"{free / 2**30:.1f} GiB of memory is free, and a rank needs about {_BYTES_PER_RANK / 2**30:.1f}",
    )


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def describe_environment(device: str) -> dict[str, str]:
    """Return the versions and sizes that a verdict may depend on."""
    return {
        "moeverify": _version("moeverify"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "backend": "nccl" if device == "cuda" else "gloo",
        "cores": str(os.cpu_count()),
    }


def default_cache() -> Path:
    """Return where full goldens are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moeverify" / "goldens"


def answer_version() -> str:
    """Return 8 hex digits that change with torch's version and with our code that a golden depends on."""
    digest = hashlib.sha256(_version("torch").encode())
    root = Path(__file__).parents[1]
    for package in _ANSWER_PACKAGES:
        place = root / package
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
