"""megablocks' own auxiliary losses, which are means over the tokens of one rank and micro-batch.

The package collects their inputs in process-wide lists, which must have one entry per layer and be cleared
in every step. Each loss takes an expert's share of tokens over its own tokens. Over several ranks and
micro-batches, the mean of these losses therefore differs from the loss of the global batch. They agree if
the golden takes it per row (balance_scope `sequence`) and every micro-batch of a rank is one row.

Source: megablocks 0.10.0, layers/moe.py (batched_load_balancing_loss), layers/router.py
(batched_router_zloss).
"""

from __future__ import annotations

from typing import Any

import torch
from megablocks.layers.moe import batched_load_balancing_loss, clear_load_balancing_loss
from megablocks.layers.router import batched_router_zloss, clear_router_zloss
from torch import Tensor, nn

from moeverify.cases.schema import MoE
from moeverify.model.megablocks.block import DroplessMoE


class OwnLosses:
    """Collector of the package's losses in a model, which it also enables.

    The package divides the balance loss by the number of layers, while the reference sums over layers. The
    weight of the loss is multiplied by that number to compensate.
    """

    def __init__(self, model: nn.Module, spec: MoE) -> None:
        blocks = [module for module in model.modules() if isinstance(module, DroplessMoE)]
        for block in blocks:
            block.args.num_layers = len(blocks)
            block.args.moe_loss_weight = spec.balance_coef * len(blocks)
            block.args.moe_zloss_weight = spec.z_coef
        self._args: Any = blocks[0].args
        self._clear()

    def collect(self) -> tuple[Tensor, Tensor]:
        """Return the balance and z loss () of the last forward pass, with gradients, and clear them."""
        balance = torch.as_tensor(batched_load_balancing_loss(self._args))
        z = batched_router_zloss(self._args).sum() if self._args.moe_zloss_weight else balance.new_zeros(())
        self._clear()
        return balance, z

    def _clear(self) -> None:
        clear_load_balancing_loss()
        clear_router_zloss()
