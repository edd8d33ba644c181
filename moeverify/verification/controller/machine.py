"""This machine: devices, rank limits, versions and caches, as seen by a process without torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeverify.errors import MachineError
from moeverify.results.obstacle import RankLimit
from moeverify.verification.launch.backend import choose_backend, choose_external
from moeverify.verification.launch.plan import Backend, Carrier, Device
from moeverify.verification.launch.world import external_world

_BYTES_PER_RANK = 700 * 2**20  # about 400 MiB measured on Linux with torch and a tiny model
_BYTES_PER_RANK_OF_GPU = 3 * 2**30  # assumption: the CUDA context and libraries also take host memory
_MOST_PROCESSES = 64
# The code that a stored golden and its noise depend on. The rest of the package only judges.
_GOLDEN_CODE = (
    "dtype_names.py",
    "hashing.py",
    "model",
    "parallel/regions",
    "seams.py",
    "tools/weights",
    "train",
    "triton_support.py",
    "verification/checks/dtype_watch.py",
    "verification/checks/module_dtypes.py",
    "verification/checks/module_replay.py",
    "verification/checks/modules.py",
    "verification/compare",
    "verification/golden",
    "verification/golden_run",
)


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """Return the device to run on. `auto` chooses CUDA if there are GPUs.

    Raises: MachineError when CUDA is requested and there is no GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and count_gpus() == 0):
        return "cpu"
    if count_gpus() == 0:
        raise MachineError("this machine has no GPU that nvidia-smi can see; use --device cpu")
    return "cuda"


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    """Return the number of GPUs visible to a rank."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in {"", "-1"}])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def find_limit(device: Device, wanted: int | None = None, *, backend: Backend = "auto") -> RankLimit:
    """Return the maximum number of ranks: the external launcher's, the machine's, or `wanted` if smaller.

    With the backend NCCL, each rank needs its own GPU.
    """
    world = external_world()
    if world is not None:
        limit = RankLimit(most=world.world_size, by="launcher", launcher=world.launcher)
    elif device == "cuda" and backend == "nccl":
        limit = RankLimit(most=count_gpus(), by="gpus")
    else:
        limit = _find_memory_limit(_BYTES_PER_RANK if device == "cpu" else _BYTES_PER_RANK_OF_GPU)
    return RankLimit(most=wanted, by="option") if wanted is not None and wanted < limit.most else limit


def _find_memory_limit(needed: int) -> RankLimit:
    free = _available_memory()
    if free is None:
        return RankLimit(most=_MOST_PROCESSES, by="processes")
    most = max(1, free // needed)
    return RankLimit(most=most, by="memory", free_memory=free, memory_per_rank=needed)


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


@dataclass(frozen=True)
class Machine:
    """The device and backend of the ranks of a run, and the maximum number of ranks.

    `wanted` is the requested backend.
    """

    device: Device
    wanted: Backend
    num_gpus: int
    limit: RankLimit

    @classmethod
    def find(
        cls,
        device: Literal["auto", "cpu", "cuda"],
        backend: Backend = "auto",
        *,
        num_ranks: int | None = None,
    ) -> Machine:
        """Return this machine with the requested device and backend, and at most `num_ranks` ranks.

        Raises: MachineError when CUDA is requested and there is no GPU.
        """
        chosen = choose_device(device)
        num_gpus = count_gpus() if chosen == "cuda" else 0
        return cls(chosen, backend, num_gpus, find_limit(chosen, num_ranks, backend=backend))

    def choose_backend(self, num_ranks: int) -> Carrier:
        """Return the backend of the collectives for this number of ranks."""
        wanted = self.wanted if external_world() is None else choose_external(self.wanted)
        return choose_backend(wanted, self.device, num_ranks=num_ranks, num_gpus=self.num_gpus)

    def describe(self, sizes: Iterable[int]) -> dict[str, str]:
        """Return the environment of jobs with these numbers of ranks; see `describe_environment`."""
        used = sorted({self.choose_backend(each) for each in sizes})
        return describe_environment(self.device, ", ".join(used))


def describe_environment(device: str, backend: str = "") -> dict[str, str]:
    """Return the versions and sizes that may affect a verdict. `backend` is the one that was used, if any."""
    return {
        "moeverify": _version("moeverify"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "backend": backend or ("nccl, gloo where ranks share a GPU" if device == "cuda" else "gloo"),
        "cores": str(os.cpu_count()),
    }


def default_cache() -> Path:
    """Return the default folder for full goldens."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moeverify" / "goldens"


def list_import_folders() -> list[str]:
    """Return the folders of PYTHONPATH."""
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


def golden_code(also: Collection[str] = ()) -> str:
    """Return 8 hex digits that change with torch's version and with the code that a golden depends on.

    `also` holds the optional checks whose tensors are part of the golden. Each check is a file of its name.
    """
    digest = hashlib.sha256(_version("torch").encode())
    root = Path(__file__).parents[2]
    files = [f"verification/checks/{name.replace(' ', '_')}.py" for name in sorted(also)]
    for part in (*_GOLDEN_CODE, *files):
        place = root / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
