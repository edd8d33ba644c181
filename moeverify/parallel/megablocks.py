"""megablocks' own router losses, as a rank's part of the loss of the global batch.

`moeverify.model.megablocks.block` describes how the package divides its experts. It exchanges counts, then
tokens, and multiplies the experts' gradients by 1/ep (layers/mlp.py, scale_gradient). An average over the
ranks that hold the same experts then completes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from moeverify.cases.schema import MoE
from moeverify.model.megablocks.losses import OwnLosses


def collect_own_losses(model: nn.Module, spec: MoE, num_shares: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that returns a micro-batch's share of the package's balance and z losses, () each.

    `num_shares` is the number of micro-batches, over all ranks, that the mean is taken over.
    """
    own = OwnLosses(model, spec)

    def collect() -> tuple[Tensor, Tensor]:
        balance, z = own.collect()  # means over the tokens of this rank and micro-batch, () both
        return balance / num_shares, z / num_shares

    return collect
