"""Import of frameworks, with clear errors for missing or outdated ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from moeverify.errors import CaseError, Problem


def import_framework(
    name: str, *, least: str, path: str = "layout.parallelize", distribution: str | None = None
) -> Any:
    """Return the module of a framework whose version is at least `least`.

    `distribution` is the name of its package for pip, by default `name`. An empty `least` is for projects without
    a package, which are imported from a checkout.

    Raises: CaseError when it is not installed, fails to import, has no version, or is too old.
    """
    distribution = distribution or name
    try:
        module = import_module(name)
    # frameworks fail in different ways if a device, compiler or library is missing
    except Exception as error:
        raise CaseError([_describe_failure(name, distribution, least, path, error)]) from error
    if not least:
        return module
    version = _find_version(module, distribution)
    if version is None:
        place = getattr(module, "__file__", None) or name
        message = (
            f"the version of `{name}` is not known: {place} has no `__version__`, and pip no {distribution}"
        )
        remedy = (
            f"install it by pip, a checkout of its source by `pip install -e`: {least} or newer is needed"
        )
        raise CaseError([Problem(message, path=path, remedy=remedy)])
    if _parse(version) < _parse(least):
        message = f"{distribution} {version} is installed; its parallelism has other arguments before {least}"
        remedy = (
            f"install {distribution} {least} or newer, or write a `parallelize` of your own for {version}"
        )
        raise CaseError([Problem(message, path=path, remedy=remedy)])
    return module


def _describe_failure(name: str, distribution: str, least: str, path: str, error: Exception) -> Problem:
    is_missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
    if is_missing:
        remedy = f'pip install "{distribution}>={least}" into the environment that runs moeverify'
        if not least:
            remedy = "add the folder of a checkout of it to PYTHONPATH"
        return Problem(f"`{name}` cannot be imported: {error}", path=path, remedy=remedy)
    message = f"`{name}` is there and cannot be imported: {type(error).__name__}: {error}"
    remedy = f'`{sys.executable} -c "import {name}"` shows where it fails'
    return Problem(message, path=path, remedy=remedy)


def _find_version(module: ModuleType, distribution: str) -> str | None:
    """Return the installed version of a framework, or the module's `__version__`, or None."""
    try:
        version: object = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = getattr(module, "__version__", None)
    return str(version) if version is not None and _parse(str(version)) else None


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def number_globally(name: str, folder: str, first: int) -> str:
    """Return the name of an expert's parameter in the whole model. Ranks number their experts from 0.

    `folder` is the module that contains the experts, and `first` the index of the rank's first expert. For
    example, `number_globally("mlp.experts.1.up.weight", "experts", 4)` is `mlp.experts.5.up.weight`.
    """
    return re.sub(rf"(?<={folder}\.)\d+(?=\.)", lambda match: str(first + int(match[0])), name)


def refuse_axes(mesh: DeviceMesh, axes: Sequence[str], why: str) -> list[Problem]:
    """Return a problem for each of these mesh axes that has more than one rank."""
    return [
        Problem(f"{why} over {axis}", path=f"layout.{axis}", remedy=f"remove layout.{axis}")
        for axis in axes
        if mesh[axis].size() > 1
    ]


def refuse_model(message: str, adapter: str) -> Problem:
    """Return the problem of a model that the function `make` of an adapter, a module, did not make."""
    remedy = f"make it by `recipe.model.factory: {adapter}:make`"
    return Problem(message, path="layout.parallelize", remedy=remedy)


def refuse_unknown_arguments(
    settings: type[Any], arguments: Mapping[str, Any], path: str = "layout.arguments"
) -> list[Problem]:
    """Return a problem for each argument that is not a field of a framework's dataclass `settings`."""
    known = [field.name for field in fields(settings)]
    return [
        Problem(
            f"{settings.__name__} of {settings.__module__.partition('.')[0]} has no `{name}`",
            path=f"{path}.{name}",
            remedy=f"it has {', '.join(known)}",
        )
        for name in arguments
        if name not in known
    ]
