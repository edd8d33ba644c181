"""Starts recording or guarding in each process of a watched script, after its import of torch.

Python imports a module of this name at startup. A `sitecustomize` further down the path still runs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# moeverify is imported only after torch, since most processes never need it.
_RECORDS, _GUARDS = "MOEVERIFY_WATCH", "MOEVERIFY_GUARD"


class _AfterTorch:
    """An import hook that finds torch as usual, and starts watching after its import.

    Some packages, such as transformers, request a spec of torch before importing it, and never load that
    spec. The hook therefore stays until torch is actually executed.
    """

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                load(module)
                _start()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _start() -> None:
    rank = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    try:
        if os.environ.get(_GUARDS):
            from moeverify.scripts.guard.start import start as start_guard

            start_guard(os.environ[_GUARDS], *rank)
        else:
            from moeverify.scripts.record.start import start

            start(os.environ[_RECORDS], *rank)
    except Exception as error:  # the script must not fail because of this
        sys.stderr.write(f"moeverify watch: nothing is watched: {type(error).__name__}: {error}\n")


def _run_next() -> None:
    """Run the `sitecustomize` that this one shadows, if any."""
    here = Path(__file__).resolve().parent
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if os.environ.get(_RECORDS) or os.environ.get(_GUARDS):
        sys.meta_path.insert(0, _AfterTorch())
    _run_next()
