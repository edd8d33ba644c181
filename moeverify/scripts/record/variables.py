"""Names of parameters outside all modules: the variables and attributes of the script that hold them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any

from torch import Tensor, nn

from moeverify.train.calls.listener import is_inner_file

_MOST_PARTS = 256  # elements of a container that are looked at


def name_by_variables(parameters: Sequence[Tensor]) -> dict[int, str]:
    """Return names such as `temperature` or `Trainer.temperature` by id, of the parameters that have one.

    Attributes of objects in running functions come before variables, which a loop over all parameters may
    have left, and these before elements of containers; inner functions come first. A name that two
    parameters share is left out. Ranks that call a hook at the same place find the same names.
    """
    wanted = {id(each) for each in parameters}
    names: list[tuple[int, str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_inner_file(frame.f_code.co_filename):
            names += (each for each in _list_names(frame.f_locals) if each[2] in wanted)
        frame = frame.f_back
    found: dict[int, str] = {}
    for _, name, key in sorted(names, key=lambda each: each[0]):
        found.setdefault(key, name)
    counts = Counter(found.values())
    return {key: name for key, name in found.items() if counts[name] == 1}


def _list_names(variables: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Yield (priority, name, id) of attributes, variables and elements of both; 0 is the highest priority."""
    for name, value in [each for each in variables.items() if not each[0].startswith("__")]:
        yield 1, name, id(value)
        yield from ((3, f"{name}.{key}", part) for key, part in _list_elements(value))
        kind = type(value)  # a proxy answers `isinstance` with code of its own
        if issubclass(kind, nn.Module | type) or kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        own = getattr(value, "__dict__", None)
        for attribute, part in list(own.items()) if type(own) is dict else ():
            path = f"{kind.__name__}.{attribute}"
            yield 0, path, id(part)
            yield from ((2, f"{path}.{key}", element) for key, element in _list_elements(part))


def _list_elements(value: Any) -> list[tuple[object, int]]:
    pairs = value.items() if type(value) is dict else enumerate(value) if type(value) in (list, tuple) else ()
    return [(key, id(part)) for key, part in islice(list(pairs), _MOST_PARTS)]


__all__ = ["name_by_variables"]
