"""Rounding to narrow dtypes inside a model, and its cost if a layout rounds other numbers.

Code that calls `.float()` rounds the same number in the same way every time. Neither other micro-batches
nor weights that are off by 1e-16 change the result. A layout that rounds partial sums instead of their
total does change it, by up to one unit in the last place of the narrow dtype: 1.2e-7 in float32. The same
holds for operators that compute in the narrow dtype.

Values that do not depend on a parameter, such as the angles of RoPE, are the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moeverify.hashing import hash_counter, key_of
from moeverify.model.float8 import FORMATS
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import is_in_backward

# Operators that round nothing: each element of their result is an element of an input, or a constant.
_COPIES = frozenset(
    {"cat", "clone", "constant_pad_nd", "embedding", "gather", "index", "index_select", "masked_fill", "max"}
    | {"min", "neg", "relu", "scatter", "slice_backward", "select_backward", "sort", "stack", "topk", "where"}
)


class NarrowRoundings(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """A context that finds the roundings to dtypes below float64 of values that depend on parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_found = 0
        # A weak reference keeps the address of its storage from being used again.
        self._depending: dict[int, StorageWeakRef] = {}
        for parameter in parameters:
            self._add(parameter)

    def handle(self, rounded: Tensor) -> Tensor:
        """Return the tensor that takes the place of a rounded one."""
        return rounded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, and handle its first result if it is a rounding."""
        result = func(*args, **(kwargs or {}))
        if not any(isinstance(each, Tensor) and self._depends(each) for each in tree_iter((args, kwargs))):
            return result
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, Tensor) and _is_rounding(func, first, args):
            self.num_found += 1
            handled = self.handle(first)
            result = handled if first is result else type(result)((handled, *result[1:]))
        for each in tree_iter(result):
            if isinstance(each, Tensor):
                self._add(each)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._depending:
            self._depending[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _depends(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._depending


def _is_rounding(func: Any, result: Tensor, args: tuple[Any, ...]) -> bool:
    """Return whether an operator makes new numbers in a dtype below float64."""
    if not result.is_floating_point() or result.dtype == torch.float64:
        return False
    if func is torch.ops.aten._to_copy.default:
        return bool(args[0].is_floating_point() and args[0].dtype.itemsize > result.dtype.itemsize)
    is_new = all(each.alias_info is None for each in func._schema.returns)
    return is_new and func.overloadpacket.__name__ not in _COPIES


class MovedRoundings(NarrowRoundings):  # type: ignore[no-untyped-call]
    """A context in which every such rounding is off by one unit in the last place.

    The directions are pseudo-random, drawn from the seed for each operator. Integers stay: they are exact.
    """

    def __init__(self, seed: int, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self._seed = seed

    def handle(self, rounded: Tensor) -> Tensor:
        """Return the neighbors of the rounded numbers."""
        index = torch.arange(rounded.numel(), device=rounded.device).view(rounded.shape)
        key = key_of(self._seed, "narrow rounding", str(self.num_found))
        up = (hash_counter(key, index) & 1).bool()
        infinity = torch.full_like(rounded, torch.inf)
        moved = torch.nextafter(rounded, torch.where(up, infinity, -infinity))
        return torch.where((rounded == rounded.round()) | ~moved.isfinite(), rounded, moved)


class NarrowPartsWatch(NarrowRoundings):  # type: ignore[no-untyped-call]
    """A context that notes the modules in whose forward passes such roundings are, and their dtypes.

    `found` maps the FQN of the innermost module, empty outside of all modules, to the narrowest dtype.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.found: dict[str, torch.dtype] = {}
        self._names = {module: logical_name(name) for name, module in model.named_modules()}
        self._inside: list[str] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note during the block."""
        enter = register_module_forward_pre_hook(self._enter)
        leave = register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            enter.remove()
            leave.remove()

    def handle(self, rounded: Tensor) -> Tensor:
        """Note the module, unless autograd runs the operator."""
        if not is_in_backward():
            name = self._inside[-1] if self._inside else ""
            known = self.found.get(name, rounded.dtype)
            self.found[name] = min(known, rounded.dtype, key=lambda dtype: dtype.itemsize)
        return rounded

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._inside.append(self._names.get(module, self._inside[-1] if self._inside else ""))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._inside:
            self._inside.pop()


class MovedFloat8(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that rounds one number per float8 conversion to the other neighbor.

    It is the number closest to the midpoint between two float8 numbers. The inputs of a rounding on two
    devices differ little and seldom move a number across such a midpoint. The error is then one unit of
    float8, and a few runs may not show it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, and move one number in the result of a conversion."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype in FORMATS.values() and result.numel():
            return move_nearest(args[0], result)
        return result


def move_nearest(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, which is x in a float8 dtype, with one number moved to its other neighbor.

    It is the number of x that is closest to a midpoint between two float8 numbers. Shapes: any, both the
    same.
    """
    facts = torch.finfo(rounded.dtype)
    exponent = torch.frexp(x.to(torch.float64)).exponent  # |x| is in [2 ** (exponent - 1), 2 ** exponent)
    spacing = (
        torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 1).clamp(min=facts.tiny) * facts.eps
    )
    error = x.to(torch.float64) - rounded.to(torch.float64)
    # There is no number beyond the largest one. Zeros stay zero, because they come from missing inputs.
    movable = (x.abs() < facts.max) & (x != 0.0)
    nearest = torch.where(movable, error.abs() / spacing, -1.0).argmax()
    if not movable.reshape(-1)[nearest]:
        return rounded
    moved = rounded.to(torch.float64).reshape(-1)
    moved[nearest] += (error.sign() * spacing).reshape(-1)[nearest]
    return moved.view(x.shape).to(rounded.dtype)
