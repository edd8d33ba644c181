"""Helper for faults without a sum over tp: partial gradients that are treated as complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from moeverify.faults.patch import Original, Patch

if TYPE_CHECKING:
    from torch import Tensor, nn


def leave_unreduced(patch: Patch, choose: Callable[[nn.Module], Iterable[Tensor]]) -> None:
    """Remove `choose(module)` of each module from the MoE parameters whose gradients are summed over tp."""
    from moeverify.parallel.moe_tensor import partial_parameters

    @patch.wrap(partial_parameters)
    def without_chosen(original: Original[list[Tensor]], model: nn.Module, *, tokens: bool) -> list[Tensor]:
        chosen = {id(parameter) for module in model.modules() for parameter in choose(module)}
        return [parameter for parameter in original(model, tokens=tokens) if id(parameter) not in chosen]
