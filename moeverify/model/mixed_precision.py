"""Mixed precision on one device: a model that computes in a narrower dtype than its parameters have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Narrowed(nn.Module):
    """A wrapper that runs `module` on copies of its parameters in `dtype`, made for every pass.

    Gradients flow back through the copies to the dtype of the parameters. A parameter that is used twice is
    copied once, so its partial gradients are summed in `dtype`, as with FSDP2. Buffers, inputs and outputs
    are unchanged.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the module's output, computed with the copies."""
        copies = {name: narrow(parameter, self.dtype) for name, parameter in self.module.named_parameters()}
        return functional_call(self.module, copies, arguments, keywords)


def narrow(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a differentiable copy in `dtype`, or the parameter itself if it is not floating point."""
    return parameter.to(dtype) if parameter.is_floating_point() else parameter
