"""Changes of the process by functions of users, such as another default dtype, that the next case would see."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch

from moeverify.faults.assignments import ABSENT, find_changes, list_holders


class ProcessState:
    """The global state of this process that functions of users may change.

    Settings are read when this object is made, so before the modules of users are imported. Replaced
    functions count from `note_functions` on: a library that replaces functions when it is imported does it once, and
    the next case, which does not import it again, needs them.
    """

    def __init__(self) -> None:
        self._settings = _read_settings()
        self._functions: list[tuple[Any, dict[str, Any]]] = []

    def note_functions(self) -> None:
        """Note the functions and classes of all loaded modules (0.1 s with torch loaded)."""
        self._functions = [(holder, dict(vars(holder))) for holder in list_holders()]

    def find_changes(self) -> list[str]:
        """Return the names of the changed settings and functions, e.g. `torch default dtype`."""
        now = _read_settings()
        found = [name for name, value in self._settings.items() if now[name] != value]
        for holder, name, old in find_changes(self._functions):
            # What had no value before was set for the first time, like a cache.
            if callable(old) and old is not ABSENT and not _is_of_torch(vars(holder).get(name)):
                found.append(f"{holder.__name__}.{name}")
        return found


def _is_of_torch(value: object) -> bool:
    """Return whether torch or this package defines a function: they replace some themselves, like `SGD.step`."""
    # A function that `functools.wraps` disguised still has the globals of the module that defines it.
    names = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None) or ""
    return str(names).partition(".")[0] in ("torch", "moeverify", "multiprocessing_pdb")


def _read_settings() -> dict[str, object]:
    """Return the settings of torch and of the process that decide how a later case computes."""
    backends = torch.backends
    return {
        "torch default dtype": torch.get_default_dtype(),
        "torch default device": torch.get_default_device(),
        "torch gradient mode": torch.is_grad_enabled(),
        "torch anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "torch deterministic mode": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "torch number of threads": torch.get_num_threads(),
        "torch precision of products": (
            torch.get_float32_matmul_precision(),
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
        ),
        "torch autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ],
        "working directory": _read_directory(),
        "signal handlers": {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)},
    }


def _read_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""
