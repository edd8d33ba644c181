"""How a module obtains the tensor to compute with from the parameter that it stores."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

View = Callable[[Tensor], Tensor]


def identity(parameter: Tensor) -> Tensor:
    """Return the parameter itself; a layout that stores a DTensor uses a view that gives the local tensor."""
    return parameter
