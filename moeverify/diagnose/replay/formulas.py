"""The formula of what went wrong first, with the inputs that one device has there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.replay.attention import AttentionFormula, Chunks
from moeverify.diagnose.replay.language import NamedFormula
from moeverify.model.attention import Attention
from moeverify.model.mla import LatentAttention
from moeverify.train.module_taps import FORWARD, Reading


@dataclass(frozen=True)
class RightModules:
    """One device's model with the weights that the step began with, and what it read at its modules in the step.

    `chunks` says which positions each rank of a context group has; `valid` (B, S) are the tokens that are no padding.
    """

    model: nn.Module
    readings: Sequence[Reading]
    chunks: Chunks
    valid: Tensor | None

    def read(self, module: str, end: str, slot: str = "0") -> Tensor | None:
        """Return what one device read forward at an end of a module."""
        wanted = (FORWARD, module, end, slot)
        return next(
            (
                each.local
                for each in self.readings
                if (each.direction, each.module, each.end, each.slot) == wanted
            ),
            None,
        )


def make_formula(origin: Origin, right: RightModules) -> NamedFormula | None:
    """Return the formula of what was read first wrong, forward; None where there is none for it."""
    modules = dict(right.model.named_modules())
    culprit = modules.get(origin.culprit)
    if origin.direction != FORWARD or culprit is None:
        return None
    x = right.read(origin.culprit, "input")
    if x is None:
        return None
    if isinstance(culprit, Attention | LatentAttention) and origin.module == f"{origin.culprit}.o_proj":
        return NamedFormula("attention", AttentionFormula(culprit, x, right.valid, right.chunks))
    return None
