"""Software and limits of this machine that optional features need, found without torch and without ranks."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
from pathlib import Path

from moeverify.results.probe import ProbeRow, Status

_PACKAGES = {
    "transformers": (
        "models of transformers, and comparison with them",
        "pip install transformers accelerate",
    ),
    "torchao": ("recipes with float8", "pip install 'moeverify[float8]'"),
    "watchfiles": ("run --watch", "pip install 'moeverify[watch]'"),
    "py-spy": ("`stacks` of the debugger for ranks that are not stopped", "pip install 'moeverify[stacks]'"),
}
_COMPILERS = ("c++", "g++", "clang++")
_LEAST_SHARED = 64 * 2**20  # the size that containers get by default
_LEAST_FILES = 1024


def find_installed() -> list[ProbeRow]:
    """Return a row for each optional package, the pytest plugin, a compiler, shared memory and open files."""
    packages = [_find_package(name, use, remedy) for name, (use, remedy) in _PACKAGES.items()]
    return [*packages, _find_plugin(), _find_compiler(), _find_shared_memory(), _find_open_files()]


def _find_package(name: str, use: str, remedy: str) -> ProbeRow:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ProbeRow(name=name, value="not installed", meaning=f"needed for {use}", remedy=remedy)
    return ProbeRow(name=name, value=version, meaning=f"for {use}")


def _find_plugin() -> ProbeRow:
    plugins = importlib.metadata.entry_points(group="pytest11")
    if not any(each.value == "moeverify.pytest_plugin" for each in plugins):
        value, remedy = "not registered", "install moeverify by pip instead of putting it on PYTHONPATH"
    elif not importlib.metadata.packages_distributions().get("pytest"):
        value, remedy = "pytest is not installed", "pip install pytest"
    else:
        return ProbeRow(name="pytest plugin", value="registered", meaning="for `pytest cases/`")
    return ProbeRow(name="pytest plugin", value=value, meaning="needed for `pytest cases/`", remedy=remedy)


def _find_compiler() -> ProbeRow:
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    use = "torch.compile on the CPU; cases without it run"
    if found is None:
        return ProbeRow(
            name="C++ compiler",
            value="none",
            meaning=f"needed for {use}",
            remedy="install g++ (Debian and Ubuntu: apt-get install g++)",
        )
    return ProbeRow(name="C++ compiler", value=found, meaning=f"for {use}")


def _find_shared_memory() -> ProbeRow:
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    value = f"{free / 2**20:.0f} MiB free"
    status: Status = "ok" if free > _LEAST_SHARED else "warn"
    return _limited(
        "/dev/shm", value, status, "NCCL between GPUs, and workers of data loaders", "--shm-size=8g"
    )


def _find_open_files() -> ProbeRow:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = most == resource.RLIM_INFINITY or most >= _LEAST_FILES
    value = "unlimited" if most == resource.RLIM_INFINITY else str(most)
    use = "connections between ranks"
    return _limited("open files", value, "ok" if is_enough else "warn", use, "--ulimit nofile=65536")


def _limited(name: str, value: str, status: Status, use: str, option: str) -> ProbeRow:
    if status == "ok":
        return ProbeRow(name=name, value=value, meaning=f"for {use}")
    remedy = f"start the container with {option}, or raise the limit of the system"
    return ProbeRow(name=name, value=value, meaning=f"needed for {use}", status=status, remedy=remedy)
