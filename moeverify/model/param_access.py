"""Access of a module to the tensor that it computes with, given its stored parameter."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

View = Callable[[Tensor], Tensor]


def identity(parameter: Tensor) -> Tensor:
    """Return the parameter itself. A layout with DTensors uses a view that returns the local tensor."""
    return parameter
