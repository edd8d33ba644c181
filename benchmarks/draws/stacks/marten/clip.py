"""The norm of the gradient of the whole actor."""

from __future__ import annotations

import torch
from torch import Tensor

from marten.comms import total
from marten.gradsync import is_expert, trained
from marten.placement import cut_of
from marten.policy import Marten


@torch.no_grad()
def norm_of(model: Marten, squares: dict[str, Tensor]) -> Tensor:
    """Return the norm for sums of squares of this rank's gradients, of which each value is counted once."""
    fleet = model.fleet
    sums = {key: torch.zeros((), dtype=torch.float64) for key in ("same", "cut", "experts")}
    for name, square in squares.items():
        key = "experts" if is_expert(name) else "same" if cut_of(name) is None else "cut"
        sums[key] = sums[key] + square
    experts = total(sums["experts"], fleet.ep)  # anchor: norm-experts
    if fleet.flagged("marten-norm-experts"):
        experts = sums["experts"]  # plant: marten-norm-experts
    whole = sums["same"] + total(sums["cut"] + experts, fleet.tp)
    if fleet.flagged("marten-norm-stage"):
        return whole.sqrt()  # plant: marten-norm-stage
    return total(whole, fleet.pp).sqrt()  # anchor: norm-stages


@torch.no_grad()
def clip(model: Marten, limit: float) -> tuple[Tensor, Tensor]:
    weights = trained(model)
    norm = norm_of(model, {name: weight.grad.double().square().sum() for name, weight in weights.items()})
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for weight in weights.values():
        weight.grad.mul_(factor)
    return norm, factor
