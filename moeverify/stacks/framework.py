"""Finding a framework, and what to say of one that is missing or too old."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module, metadata
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

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


def refuse_axes(mesh: DeviceMesh, axes: Sequence[str], why: str) -> list[Problem]:
    """Return a problem for each of these axes of a mesh that has more than one rank."""
    return [
        Problem(f"{why} over {axis}", path=f"layout.{axis}", remedy=f"remove layout.{axis}")
        for axis in axes
        if mesh[axis].size() > 1
    ]


def refuse_unknown_arguments(settings: type[Any], arguments: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each argument that a dataclass of a framework has no field for."""
    known = [field.name for field in fields(settings)]
    return [
        Problem(
            f"{settings.__name__} of {settings.__module__.partition('.')[0]} has no `{name}`",
            path=f"layout.arguments.{name}",
            remedy=f"it has {', '.join(known)}",
        )
        for name in arguments
        if name not in known
    ]
