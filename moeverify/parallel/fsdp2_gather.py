"""One gather and one reduction of FSDP2 for passes that it does not see.

FSDP2 gathers and reduces in hooks around the forward passes of its modules. Here these modules only pass a number on:
the hooks run as ever, forward they gather, and in the backward pass they reduce whatever gradients have been put into
the gathered parameters in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moeverify.seams import seam


@seam
def gather(model: nn.Module, device: torch.device) -> Tensor | None:
    """Have FSDP2 gather all parameters of a model, which then are those that its modules have.

    Return a tensor whose backward pass has it reduce their gradients; None for a model that it has not sharded.
    Nothing may be freed after forward passes (`reshard: step`). Collective: all ranks of the model's meshes.
    """
    if not isinstance(model, FSDPModule):
        return None
    with _passing_on(model):
        sign: Tensor = model(torch.zeros((), device=device, requires_grad=True))
    return sign


@contextmanager
def _passing_on(model: nn.Module) -> Iterator[None]:
    """Let each module that FSDP2 has sharded call those inside, and compute nothing itself."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.forward = partial(_pass_on, list(_outermost(module)))
    try:
        yield
    finally:
        for module in sharded:
            del module.forward


def _pass_on(inside: list[nn.Module], sign: Tensor) -> Tensor:
    for module in inside:
        sign = module(sign)
    return sign.clone()


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the sharded modules inside a module that are in no other one inside it."""
    for child in module.children():
        if isinstance(child, FSDPModule):
            yield child
        else:
            yield from _outermost(child)
