"""Frameworks that always round: a function mode in which they compute in the precision of their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moeverify.train.wide_operators import multiply_groups


class KeptPrecision(TorchFunctionMode):
    """Function mode in which a framework computes in the precision of its parameters.

    torchtitan 0.3.0 always rounds the operands of its experts to bfloat16 and its logits to float32, and
    OLMo-core its norms, routers and logits to float32. This would hide errors of a layout. In this mode the
    conversions do nothing. The grouped product, which requires bfloat16 on GPUs, is computed expert by expert
    for wider operands.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function, without conversions that round."""
        if func in (Tensor.bfloat16, Tensor.float) and args[0].dtype in (torch.float32, torch.float64):
            return args[0]
        if func is torch._grouped_mm and args[0].dtype in (torch.float32, torch.float64):
            return multiply_groups(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
