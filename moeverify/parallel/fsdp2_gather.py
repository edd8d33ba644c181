"""One FSDP2 gather and reduction around passes that FSDP2 does not see.

FSDP2 gathers and reduces in hooks around the forward passes of its modules. Here these modules only pass a
scalar on, and the hooks run as usual. In forward they gather. In backward they reduce the gradients that
were stored in the gathered parameters in between.
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
    """Make FSDP2 gather all parameters of a model, and return a tensor that triggers their reduction.

    After the call the modules hold the gathered parameters. The backward pass of the returned tensor
    (scalar) makes FSDP2 reduce their gradients. Returns None for a model that FSDP2 has not sharded.
    Parameters must stay gathered after forward passes (`reshard: step`). Collective: all ranks of the
    model's meshes.
    """
    if not isinstance(model, FSDPModule):
        return None
    with _passing_on(model):
        sign: Tensor = model(torch.zeros((), device=device, requires_grad=True))
    return sign


@contextmanager
def _passing_on(model: nn.Module) -> Iterator[None]:
    """Replace the forward of each sharded module by one that only calls the sharded modules inside it."""
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
    """Yield the outermost sharded modules inside a module."""
    for child in module.children():
        if isinstance(child, FSDPModule):
            yield child
        else:
            yield from _outermost(child)
