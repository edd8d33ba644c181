"""A whole model that computes in a narrower dtype than that of its parameters: mixed precision on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Narrowed(nn.Module):
    """Runs `module` on copies of its parameters in `dtype`, made anew for every pass.

    Gradients go back through the copies and arrive in the dtype of the parameters. A parameter that is used
    twice is copied once, so its partial gradients are summed in `dtype`, as they are where FSDP2 gathers it. Buffers,
    inputs and outputs stay as they are.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what the module returns, computed on the copies."""
        copies = {name: narrow(parameter, self.dtype) for name, parameter in self.module.named_parameters()}
        return functional_call(self.module, copies, arguments, keywords)


def narrow(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a differentiable copy in `dtype`; what is no floating-point number stays as it is."""
    return parameter.to(dtype) if parameter.is_floating_point() else parameter
