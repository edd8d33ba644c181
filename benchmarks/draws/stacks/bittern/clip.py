"""The norm of the gradient of the whole model, and the clip by it."""

from __future__ import annotations

import torch
from torch import Tensor

from bittern.regions import all_reduce


@torch.no_grad()
def square_norm(model) -> Tensor:
    """Return the square of the norm: each value counts once, although several ranks may have it."""
    ps = model.ps
    cut = whole = expert = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        square = parameter.grad.square().sum()
        info = model.infos[name]
        if info.expert:
            expert = expert + square
        elif info.tp_dim is None and ps.mode != "bittern-norm-replicas":  # plant: bittern-norm-replicas
            whole = whole + square  # anchor: norm-whole
        else:
            cut = cut + square
    if ps.mode == "bittern-norm-roots":
        expert = all_reduce(expert.sqrt(), ps.ep).square()  # plant: bittern-norm-roots
    elif ps.mode == "bittern-norm-experts":
        expert = all_reduce(expert, ps.tp)  # plant: bittern-norm-experts
    else:
        expert = all_reduce(expert, ps.ep)  # anchor: norm-experts
    return whole + all_reduce(cut, ps.tp) + expert


@torch.no_grad()
def clip_gradients(model, limit: float) -> tuple[Tensor, Tensor]:
    norm = square_norm(model).sqrt()
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    factors = {False: coefficient, True: coefficient}  # anchor: clip
    if model.ps.mode == "bittern-clip-own":
        own = sum(p.grad.square().sum() for p in model.parameters()).sqrt()  # plant: bittern-clip-own
        factors[True] = (limit / (own + 1e-6)).clamp(max=1.0)  # plant: bittern-clip-own
    for name, parameter in model.named_parameters():
        parameter.grad.mul_(factors[model.infos[name].tp_dim is not None])
    return norm, coefficient
