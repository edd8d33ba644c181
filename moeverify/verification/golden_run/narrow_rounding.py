"""Rounding to narrow dtypes inside a model, and its cost if a layout rounds other numbers.

Code that calls `.float()` rounds the same number in the same way every time. Neither other micro-batches
nor weights that are off by 1e-16 change the result. A layout that rounds partial sums instead of their
total does change it, by up to one unit in the last place of the narrow dtype: 1.2e-7 in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeverify.hashing import hash_counter, key_of
from moeverify.model.float8 import FORMATS


class MovedRoundings(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """A context in which every conversion of float64 numbers to a narrower dtype is off by one unit.

    The directions are pseudo-random, drawn from the seed for each conversion.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self.num_conversions = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, and move the result of a conversion."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._to_copy.default or args[0].dtype != torch.float64:
            return result
        if not result.is_floating_point() or result.dtype == torch.float64:
            return result
        self.num_conversions += 1
        return self._move(result)

    def _move(self, rounded: Tensor) -> Tensor:
        index = torch.arange(rounded.numel(), device=rounded.device).view(rounded.shape)
        key = key_of(self._seed, "narrow rounding", str(self.num_conversions))
        up = (hash_counter(key, index) & 1).bool()
        infinity = torch.full_like(rounded, torch.inf)
        return torch.nextafter(rounded, torch.where(up, infinity, -infinity))


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
