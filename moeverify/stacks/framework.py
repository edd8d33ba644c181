"""Finding a framework, and what to say of one that is missing or too old."""

from __future__ import annotations

import re
from importlib import import_module, metadata
from typing import Any

from moeverify.errors import CaseError, Problem


def import_framework(name: str, *, least: str, path: str = "layout.parallelize") -> Any:
    """Return a framework's module, of at least the version `least`.

    Raises: CaseError where it is not installed, or older.
    """
    try:
        module = import_module(name)
    except ImportError as error:
        remedy = f'pip install "{name}>={least}" into the environment that runs moeverify'
        raise CaseError(
            [Problem(f"`{name}` cannot be imported: {error}", path=path, remedy=remedy)]
        ) from error
    version = metadata.version(name)
    if _parse(version) < _parse(least):
        message = f"{name} {version} is installed; its parallelism has other arguments before {least}"
        remedy = f"install {name} {least} or newer, or write a `parallelize` of your own for {version}"
        raise CaseError([Problem(message, path=path, remedy=remedy)])
    return module


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
