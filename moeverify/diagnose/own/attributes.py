"""Mistakes in plain attributes: those of a user's module, of modules inside of it, and of their configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moeverify.diagnose.own.replay import Candidate, Stage
from moeverify.diagnose.own.trace import Trace
from moeverify.results.own_module import Mistake

ACTIVATIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("relu", F.relu),
    ("gelu", F.gelu),
    ("tanh-approximated gelu", lambda x: F.gelu(x, approximate="tanh")),
    ("quick gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    ("silu", F.silu),
    ("sigmoid", torch.sigmoid),
    ("tanh", torch.tanh),
    ("squared relu", lambda x: F.relu(x) ** 2),
    ("leaky relu", F.leaky_relu),
    ("softplus", F.softplus),
    ("mish", F.mish),
    ("identity", lambda x: x),
)
_NO_ATTRIBUTES = frozenset({"training", "T_destination", "dump_patches", "call_super_init"})


class _Activation(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return self.function(x)


def list_attribute_mistakes(
    trace: Trace, owners: Sequence[tuple[str, object]], sizes: Sequence[int]
) -> Iterator[Candidate]:
    """Yield other values of the attributes that were read; `sizes` are those of the layout's axes.

    `owners` are modules and configurations with the name of the module that has them.
    """
    seen: set[tuple[int, str]] = set()
    for module, owner in owners:
        for name in trace.read.get(id(owner), ()):
            if name.startswith("_") or name in _NO_ATTRIBUTES or (id(owner), name) in seen:
                continue
            seen.add((id(owner), name))
            try:
                value = getattr(owner, name)
            except AttributeError:
                continue
            yield from _list_others(module, owner, name, value, sizes)


def _list_others(
    module: str, owner: object, name: str, value: Any, sizes: Sequence[int]
) -> Iterator[Candidate]:
    def make(way: str, after: object, text: str, start: float | None = None) -> Candidate:
        mistake = Mistake(
            part="attribute", name=name, way=way, module=module, before=_write(value), after=text
        )
        return Candidate(mistake, partial(_set, owner, name, after), start)

    if isinstance(value, bool):
        yield make("value", not value, str(not value))
    elif isinstance(value, int):
        for other in _list_numbers(value, sizes):
            yield make("value", other, str(other))
    elif isinstance(value, float):
        for plain in (0.0, 1.0, -value):
            if plain != value:
                yield make("value", plain, _write(plain))
        yield make("fitted", None, "", value)
    elif _is_activation(value):
        for text, function in ACTIVATIONS:
            after = _Activation(function) if isinstance(value, nn.Module) else function
            yield make("activation", after, text)


def _set(owner: Any, name: str, after: Any, stage: Stage, number: float) -> None:
    stage.set_attribute(owner, name, number if after is None else after)


def _list_numbers(value: int, sizes: Sequence[int]) -> list[int]:
    """Return the integers that somebody may have in the place of one, the nearest first."""
    others = [value - 1, value + 1, value * 2, value // 2, 1, 0, -value]
    others += [value * size for size in sizes] + [value // size for size in sizes]
    others += [value - 2, value + 2]
    return [other for other in dict.fromkeys(others) if other != value]


def _is_activation(value: object) -> bool:
    """Return whether a value is a function of torch, or a module without parameters and modules inside."""
    if isinstance(value, nn.Module):
        return not any(True for _ in value.parameters()) and not any(True for _ in value.children())
    is_function = isinstance(value, FunctionType | type(torch.tanh))
    return is_function and str(getattr(value, "__module__", "")).startswith(("torch", "None"))


def _write(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return str(getattr(value, "__name__", value))
