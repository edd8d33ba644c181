"""Choices of operators such as `topk`: recorded on a rank, and repeated when one device runs the same module.

Such an operator returns indices of a float tensor. At a near tie, rounding changes the indices and everything that
follows. One device therefore takes the indices of the rank if its own numbers there are equal up to rounding. It
ignores any other choice of the rank, so that the effect of a wrong choice is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

# Operators that choose elements of their first argument, with the position of the argument `dim`.
_PLACE_OF_DIM = {"topk": 2, "kthvalue": 2} | dict.fromkeys(
    ("sort", "argsort", "argmax", "argmin", "max", "min", "median"), 1
)

# Units of rounding, relative to the largest number of a row, by which a chosen number may fall behind.
_ROUNDINGS = 4.0

# Attribute of the indices of a choice that was replaced: by how much its numbers may be behind, in each row.
_BEHIND = "moeverify_behind"


@dataclass(frozen=True)
class Selection:
    """Indices that an operator chose, with its name and the dim that they refer to; None for all elements.

    `behind` (..., 1) is set where a run repeats the choice of another one: for each row, how much lower the
    numbers of this choice may be than the numbers that the operator would choose.
    """

    operator: str
    dim: int | None
    indices: Tensor
    behind: Tensor | None = None


def read_selection(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Selection | None:
    """Return the choice of an operator that was called; None if it makes none among floats."""
    name = getattr(func, "__name__", "")
    values = args[0] if args else kwargs.get("input")
    if name not in _PLACE_OF_DIM or not isinstance(values, Tensor) or isinstance(values, DTensor):
        return None
    indices = result[1] if isinstance(result, tuple) else result
    if not values.is_floating_point() or not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        return None
    place = _PLACE_OF_DIM[name]
    given = args[place] if len(args) > place and not isinstance(args[place], bool) else None
    default = None if name in ("argmax", "argmin") else -1
    dim = kwargs.get("dim", given if given is not None else default)
    return Selection(name, dim, indices, getattr(indices, _BEHIND, None))


class RecordedSelections(TorchFunctionMode):
    """A context that records the choices in it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Selection] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator and record its choice."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            made = read_selection(func, args, kwargs or {}, result)
            if made is not None:
                self.made.append(replace(made, indices=made.indices.detach().clone()))
        return result


class HeldSelections(TorchFunctionMode):
    """A context in which operators make the given choices, in order, where rounding allows them.

    `unit` is the distance from 1.0 to the next number of the precision. A choice of another operator, or of
    another number of elements, ends the replay: later choices are free.
    """

    def __init__(self, selections: Sequence[Selection], unit: float) -> None:
        super().__init__()
        self._left = list(reversed(selections))
        self._unit = unit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, and replace its choice."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        own = read_selection(func, args, kwargs, result)
        if own is None or not self._left:
            return result
        held = self._left.pop()
        if (held.operator, held.dim, held.indices.shape) != (own.operator, own.dim, own.indices.shape):
            self._left = []
            return result
        values = args[0] if args else kwargs["input"]
        indices = _choose_within_rounding(values, own, held, _ROUNDINGS * self._unit)
        return replace_choice(result, values, replace(own, indices=indices))


def replace_choice(result: Any, values: Tensor, made: Selection) -> Any:
    """Return the result of an operator as if it had made a choice among its values, in the same shapes."""
    indices, dim = made.indices, made.dim
    if made.behind is not None:
        setattr(indices, _BEHIND, made.behind)
    if not isinstance(result, tuple):
        return indices
    return type(result)((_take(values, indices, dim), indices))


def _take(values: Tensor, indices: Tensor, dim: int | None) -> Tensor:
    """Return the elements at indices along a dim, which the indices may lack."""
    if dim is None:
        return values.reshape(-1)[indices.reshape(-1)].reshape(indices.shape)
    if indices.ndim == values.ndim:
        return values.gather(dim, indices)
    return values.gather(dim, indices.unsqueeze(dim)).squeeze(dim)


@torch.no_grad()
def _choose_within_rounding(values: Tensor, own: Selection, held: Selection, slack: float) -> Tensor:
    """Return the held indices, in rows where their numbers equal the operator's own choice up to `slack`."""
    wide = values.detach().to(torch.float64)
    indices = held.indices.to(own.indices.device)
    behind = (_take(wide, own.indices, own.dim) - _take(wide, indices, own.dim)).abs().nan_to_num(torch.inf)
    sizes = wide.abs().masked_fill(~wide.isfinite(), 0.0)
    if own.dim is None:
        return indices if bool((behind <= slack * sizes.max()).all()) else own.indices
    # The largest number of a row is the unit: smaller ones may be differences of large ones.
    allowed = slack * sizes.amax(dim=own.dim, keepdim=True)
    if held.behind is not None:
        allowed = allowed + held.behind.to(allowed.device)
    if behind.ndim < wide.ndim:
        return torch.where(behind <= allowed.squeeze(own.dim), indices, own.indices)
    return torch.where((behind <= allowed).all(dim=own.dim, keepdim=True), indices, own.indices)
