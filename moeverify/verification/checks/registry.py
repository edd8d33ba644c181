"""All checks, discovered in the files of this package, in the order of `CheckName`."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from moeverify.results.checks import CheckName
from moeverify.verification.checks.base import Check


def _find_checks() -> tuple[Check[Any], ...]:
    """Return the checks that the modules of this package list in `CHECKS`."""
    found: dict[str, Check[Any]] = {}
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if f"{package}.{module.name}" == __name__:
            continue
        for check in getattr(import_module(f"{package}.{module.name}"), "CHECKS", ()):
            found[check.name] = check
    return tuple(found[name] for name in CheckName)


CHECKS = _find_checks()

KIND_ORDER: Mapping[str, int] = {
    kind: number for number, kind in enumerate(kind for check in CHECKS for kind in check.kinds)
}
"""Position of each kind in a training step."""


def check_of(kind: str) -> Check[Any]:
    """Return the check that compares the tensors of a kind with the golden."""
    return next(check for check in CHECKS if kind in check.kinds)


def choose_checks(*, also: Collection[str] = (), skip: Collection[str] = ()) -> Sequence[Check[Any]]:
    """Return the checks to run: the default ones, and the optional ones in `also`, without `skip`."""
    return [
        check
        for check in CHECKS
        if check.name not in skip and (not check.name.is_optional or check.name in also)
    ]
