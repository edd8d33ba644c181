"""Changes by users' functions, such as another default dtype, that would affect the next case."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moeverify.faults.assignments import ABSENT, find_changes, list_holders


class ProcessSettings:
    """Settings of torch and of the process that affect results, read on creation."""

    def __init__(self) -> None:
        self._kept = {name: each.read() for name, each in _SETTINGS.items()}

    def find_changes(self) -> list[str]:
        """Return the names of the settings that differ now, e.g. `torch default dtype`."""
        return [name for name, value in self._kept.items() if _SETTINGS[name].read() != value]

    def restore(self) -> None:
        """Give changed settings their kept values."""
        for name in self.find_changes():
            _SETTINGS[name].write(self._kept[name])


class ProcessState:
    """The global state of this process that functions of users may change.

    Settings are read when this object is made, so before the modules of users are imported. Replaced
    functions count from `note_functions` on: a library that replaces functions when it is imported does it once, and
    the next case, which does not import it again, needs them.
    """

    def __init__(self) -> None:
        self._settings = ProcessSettings()
        self._functions: list[tuple[Any, dict[str, Any]]] = []

    def note_functions(self) -> None:
        """Note the functions and classes of all loaded modules (0.1 s with torch loaded)."""
        self._functions = [(holder, dict(vars(holder))) for holder in list_holders()]

    def find_lasting_changes(self) -> list[str]:
        """Restore the settings, and return the names of other changes, e.g. `Linear.forward`."""
        self._settings.restore()
        found = self._settings.find_changes()
        for holder, name, old in find_changes(self._functions):
            # A setting without an earlier value was set for the first time, like a cache.
            if callable(old) and old is not ABSENT and not _is_of_torch(vars(holder).get(name)):
                found.append(f"{holder.__name__}.{name}")
        return found


def _is_of_torch(value: object) -> bool:
    """Return whether torch or this package defines a function: they replace some themselves, like `SGD.step`."""
    # A function that `functools.wraps` disguised still has the globals of the module that defines it.
    names = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None) or ""
    return str(names).partition(".")[0] in ("torch", "moeverify", "multiprocessing_pdb")


def _read_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""


def _enter_directory(path: str) -> None:
    with suppress(OSError):  # it was removed
        os.chdir(path)


@dataclass(frozen=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _write_device(value: torch.device) -> None:
    torch.set_default_device(
        None if value.type == "cpu" else value
    )  # a mode of all functions, even for the CPU


def _read_anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _read_deterministic_mode() -> tuple[bool, bool]:
    algorithms = torch.are_deterministic_algorithms_enabled()
    return algorithms, torch.is_deterministic_algorithms_warn_only_enabled()


def _write_deterministic_mode(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _read_products() -> tuple[str, bool, bool, bool, bool]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        cudnn.benchmark,
        cudnn.deterministic,
    )


def _write_products(value: tuple[str, bool, bool, bool, bool]) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    torch.set_float32_matmul_precision(value[0])
    matmul.allow_bf16_reduced_precision_reduction = value[1]
    matmul.allow_fp16_reduced_precision_reduction = value[2]
    cudnn.benchmark, cudnn.deterministic = value[3:]


def _read_autocast() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    ]


def _write_autocast(value: list[tuple[str, bool, torch.dtype]]) -> None:
    for kind, enabled, dtype in value:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _read_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def _write_handlers(value: dict[int, Any]) -> None:
    for number, handler in value.items():
        if handler is not None:  # None: installed by native code, which Python cannot install again
            signal.signal(number, handler)


_SETTINGS = {
    "torch default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "torch default device": _Setting(torch.get_default_device, _write_device),
    "torch gradient mode": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch anomaly mode": _Setting(
        _read_anomaly_mode, lambda value: torch.autograd.set_detect_anomaly(*value)
    ),
    "torch deterministic mode": _Setting(_read_deterministic_mode, _write_deterministic_mode),
    "torch number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "torch precision of products": _Setting(_read_products, _write_products),
    "torch autocast": _Setting(_read_autocast, _write_autocast),
    "working directory": _Setting(_read_directory, _enter_directory),
    "signal handlers": _Setting(_read_handlers, _write_handlers),
}
