"""Execution of one recorded operator on given values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from moeverify.explain.program import LEAF, READ, UNSEEN, Geometry, Op, list_refs, map_refs

Lookup = Callable[[int], Tensor | None]
"""Function that returns the data of a value by its number; None if the data was not kept."""

_ON_CPU = torch.device("cpu")

# Executed as `reshape`: a copy may have other strides than the original.
_AS_RESHAPE = {"aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default"}


class NotExecutable(Exception):
    """Raised for an operator that cannot be executed again, such as one that draws random numbers."""


@cache
def find(name: str) -> OpOverload:
    """Return an operator by its full name.

    Raises: NotExecutable if this process has no such operator.
    """
    space, packet, overload = (*name.split(".", 2), "default")[:3]
    found = getattr(getattr(torch.ops, space, None), packet, None)
    if found is None:
        raise NotExecutable(name)
    return cast(OpOverload, getattr(found, overload or "default"))


def is_random(op: Op) -> bool:
    """Return whether an operator draws random numbers or returns uninitialized memory."""
    space, packet, *_ = op.name.split(".")
    if space == "memory":
        return packet in (LEAF, UNSEEN)
    return is_blank(op) or is_draw(op)


def is_blank(op: Op) -> bool:
    """Return whether an operator allocates memory without writing to it."""
    return op.short.startswith(("empty", "new_empty"))


def creates(op: Op) -> bool:
    """Return whether an operator makes values of which no operand decides more than the shape, such as zeros."""
    return op.short.endswith("_like") or op.short.startswith("new_") or not list(op.reads())


def is_draw(op: Op) -> bool:
    """Return whether an operator draws random numbers."""
    if not op.name.startswith("aten.") or torch.Tag.nondeterministic_seeded not in find(op.name).tags:
        return False
    return has_dropout(find(op.name), op.args, op.kwargs)


def has_dropout(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call uses dropout. True for random operators without a dropout option."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def run(op: Op, lookup: Lookup) -> list[Tensor]:
    """Return the values that an operator returns, then the values that it writes.

    They are in the order of `op.results`. Raises: NotExecutable.
    """
    if op.name == f"memory.{READ}":
        return [_read(op, lookup)]
    if is_random(op) or op.name.startswith("collective."):
        raise NotExecutable(op.name)
    return execute_all(op.name, op.args, op.kwargs, op.written, lookup)


def execute_all(
    name: str,
    args: Sequence[Any],
    named: Mapping[str, Any],
    written: Sequence[int | str],
    lookup: Lookup,
) -> list[Tensor]:
    """Return the values that an operator returns, then those it writes. Written arguments are copied first.

    Raises: NotExecutable if the operator fails or a value was not kept.
    """
    func = find(name)
    if "scaled_dot_product" in name and _takes_empty(args, lookup):
        raise NotExecutable(
            f"{name} of no heads"
        )  # torch 2.11 divides by zero on CPU, which kills the process
    values = [_fill(each, lookup) for each in args]
    by_name = {key: _fill(each, lookup) for key, each in named.items()}
    changed: list[Tensor] = []
    for place in written:
        copies = _clone(by_name[place] if isinstance(place, str) else values[place])
        if isinstance(place, str):
            by_name[place] = copies
        else:
            values[place] = copies
        changed += flatten_tensors(copies)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if sizes have changed and `out` has another size
            result = _call(name, func, values, by_name)
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError, NotImplementedError) as error:
        raise NotExecutable(f"{name}: {error}") from error
    new = [each for each in flatten_tensors(result) if not any(each is one for one in changed)]
    return [*new, *changed]


def _takes_empty(args: Sequence[Any], lookup: Lookup) -> bool:
    return any(data is not None and not data.numel() for data in map(lookup, list_refs(list(args))))


def execute(func: OpOverload, args: Any, named: Mapping[str, Any], lookup: Lookup) -> Any:
    """Return the results of an operator that writes nothing."""
    name = f"{func.namespace}.{func.overloadpacket.__name__}.{func._overloadname}"
    values = [_fill(each, lookup) for each in args]
    return _call(name, func, values, {key: _fill(each, lookup) for key, each in named.items()})


def _call(name: str, func: OpOverload, values: list[Any], named: Mapping[str, Any]) -> Any:
    if name in _AS_RESHAPE and isinstance(values[0], Tensor):
        return values[0].reshape(values[1])
    return func(*values, **named)


def _fill(argument: Any, lookup: Lookup) -> Any:
    def replace(number: int) -> Tensor:
        data = lookup(number)
        if data is None:
            raise NotExecutable(f"value {number} was not kept")
        return data

    if isinstance(argument, torch.device):
        return _ON_CPU
    return map_refs(argument, replace)


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_clone(each) for each in value] if isinstance(value, list | tuple) else value


def flatten_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or result: itself, or members of lists in lists."""
    if isinstance(value, Tensor):
        return [value]
    return (
        [each for part in value for each in flatten_tensors(part)] if isinstance(value, list | tuple) else []
    )


def _read(op: Op, lookup: Lookup) -> Tensor:
    """Assemble parts as they were written, and return the data at the wanted place."""
    sources, places, wanted, size = op.args
    parts = [_fill(each, lookup) for each in sources]
    memory = torch.zeros(size, dtype=parts[0].dtype)
    try:
        for part, place in zip(parts, places, strict=True):
            _place(memory, place).copy_(part)
        return _place(memory, wanted).clone()
    except RuntimeError as error:
        raise NotExecutable(str(error)) from error


def _place(memory: Tensor, place: Geometry) -> Tensor:
    return memory.as_strided(place.shape, place.stride, place.offset)
