"""What modes that watch operators of torch have in common: what they pass by, what a call takes and writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NO_OPERATORS = torch._C._disabled_torch_dispatch_impl


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """A mode that watches operators. Subclasses of tensors are to be seen as what they are made of."""

    supports_higher_order_operators = True  # such as flex attention: they are called as they are

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that what is compiled is compiled as without this mode, which sees its inputs and outputs."""
        return True


def is_passed_by(func: Any, types: Any) -> bool:
    """Return whether a call has no values to look at: of an operator of operators, or of fake tensors.

    DTensor asks these for shapes.
    """
    return not isinstance(func, OpOverload) or any(issubclass(each, FakeTensor) for each in types)


def has_own_operators(kind: type) -> bool:
    """Return whether a class of tensors says itself what an operator does."""
    return getattr(kind, "__torch_dispatch__", None) not in (None, Tensor.__torch_dispatch__, _NO_OPERATORS)


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has elements of its own that can be looked at."""
    is_real = tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
    return is_real and tensor.numel() > 0 and tensor.layout == torch.strided


def is_view(func: Any) -> bool:
    """Return whether a call gives out the memory of what it gets, and neither reads nor writes it."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def pair_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of a schema with their values."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def list_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with elements among arguments or results, however deep in lists."""
    if isinstance(value, Tensor):
        if has_memory(value):
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from list_tensors(each)
