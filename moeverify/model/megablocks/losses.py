"""megablocks' own auxiliary losses, as it computes them: means over the tokens of one rank and micro-batch.

The package keeps what they need in lists of the process, which want one entry a layer and must be emptied in
every step. Over several ranks and micro-batches the mean of these losses is not the loss of the global batch,
since the share of tokens of an expert is taken over other tokens: they agree where the golden takes it row by
row (balance_scope `sequence`) and every micro-batch of a rank is one row.

Source: megablocks 0.10.0, layers/moe.py (batched_load_balancing_loss), layers/router.py (batched_router_zloss).
"""

from __future__ import annotations

from typing import Any

import torch
from megablocks.layers.moe import batched_load_balancing_loss, clear_load_balancing_loss
from megablocks.layers.router import batched_router_zloss, clear_router_zloss
from torch import Tensor, nn

from moeverify.case.schema import MoE
from moeverify.model.megablocks.block import DroplessMoE


class OwnLosses:
    """Turns the package's losses on in a model, and collects them.

    Its balance loss is divided by the number of layers where ours is a sum over them; so its weight is
    multiplied by it.
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
        """Return the balance and the z loss of the last forward pass, (), with gradients, and forget them."""
        balance = torch.as_tensor(batched_load_balancing_loss(self._args))
        z = batched_router_zloss(self._args).sum() if self._args.moe_zloss_weight else balance.new_zeros(())
        self._clear()
        return balance, z

    def _clear(self) -> None:
        clear_load_balancing_loss()
        clear_router_zloss()
