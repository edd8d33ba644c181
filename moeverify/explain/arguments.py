"""Operator arguments as plain data: tensors become value references; memory is located by its geometry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from moeverify.explain.program import Geometry, Ref

_NO_OPERATORS = torch._C._disabled_torch_dispatch_impl


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def geometry_of(tensor: Tensor) -> Geometry:
    return Geometry(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def has_operators(kind: type) -> bool:
    """Return whether a tensor subclass implements operators itself."""
    return getattr(kind, "__torch_dispatch__", None) not in (None, Tensor.__torch_dispatch__, _NO_OPERATORS)


def name_of(func: OpOverload) -> str:
    return f"{func.namespace}.{func.overloadpacket.__name__}.{func._overloadname}"


def pair(
    func: OpOverload, args: Any, named: Mapping[str, Any]
) -> Iterator[tuple[int | str, tuple[Any, Any]]]:
    """Yield (position or name, (schema argument, value)) for each argument of a call."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield number, (argument, args[number])
        elif argument.name in named:
            yield argument.name, (argument, named[argument.name])


def argument_at(args: Sequence[Any], named: Mapping[str, Any], place: int | str) -> Any:
    return named[place] if isinstance(place, str) else args[place]


def encode(value: Any, find: Any) -> Any:
    """Return an argument as data, with tensors replaced by `Ref(find(tensor))`."""
    if isinstance(value, Tensor):
        return Ref(find(value)) if has_memory(value) else f"<{value.layout} tensor>"
    if isinstance(value, list):
        return [encode(each, find) for each in value]
    if isinstance(value, tuple):
        return tuple(encode(each, find) for each in value)
    if value is None or isinstance(
        value,
        bool | int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format,
    ):
        return value
    return f"<{type(value).__name__}>"


def list_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if has_memory(value) else []
    if isinstance(value, list | tuple):
        return [each for part in value for each in list_tensors(part)]
    return []


def is_any(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return whether a tensor is one of several, and does not only equal it."""
    return any(tensor is each for each in tensors)


def count_members(func: OpOverload, taken: Sequence[Any]) -> int:
    """Return how many tensors a list operator (`_foreach_*`, fused optimizers) processes; else 0."""
    if not func.overloadpacket.__name__.startswith(
        ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
    ):
        return 0
    sizes = {
        len(each)
        for each in taken
        if isinstance(each, list | tuple) and any(isinstance(x, Ref) for x in each)
    }
    return sizes.pop() if len(sizes) == 1 else 0


def member(values: Any, number: int, count: int) -> Any:
    """Return the arguments of a list operator for one member: each list with that member alone."""

    def take(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == count:
            return [value[number]]
        return value

    return (
        [take(each) for each in values]
        if isinstance(values, list | tuple) and not is_list(values, count)
        else take(values)
    )


def is_list(values: Any, count: int) -> bool:
    return len(values) == count and all(isinstance(each, Tensor | Ref) for each in values)


def member_of(named: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
    return {
        name: member(value, number, count) if isinstance(value, list | tuple) else value
        for name, value in named.items()
    }


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has readable elements. FSDP1 frees the storage of tensors that it keeps."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return False
    size = tensor.untyped_storage().nbytes()
    return not tensor.numel() or size >= geometry_of(tensor).extent.stop * tensor.element_size()


def is_equal(data: Tensor, tensor: Tensor) -> bool:
    """Return whether a copy equals a tensor bit for bit, with NaN equal to NaN."""
    actual = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    if torch.equal(data, actual):
        return True
    if not data.is_floating_point():
        return False
    return bool(((data == actual) | (data.isnan() & actual.isnan())).all())


def list_visible(
    size: int, writes: Sequence[tuple[int, Geometry]], wanted: Geometry
) -> list[tuple[int, Geometry]]:
    """Return the writes that a read of a place shows, oldest first, in a storage of `size` elements.

    Later writes hide earlier ones. Empty if some of the elements that are read were not written.
    """
    done = torch.ones(size, dtype=torch.bool)  # not read, or found
    done.as_strided(wanted.shape, wanted.stride, wanted.offset).fill_(False)
    num_done, found = int(done.sum()), []
    for number, place in reversed(writes):
        done.as_strided(place.shape, place.stride, place.offset).fill_(True)
        before, num_done = num_done, int(done.sum())
        if num_done > before:
            found.append((number, place))
        if num_done == size:
            return found[::-1]
    return []
