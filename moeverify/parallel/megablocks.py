"""megablocks' own router losses as a rank's part of the loss of the global batch.

How the package divides its experts is said by `moeverify.model.megablocks.block`: it exchanges counts, then tokens,
and multiplies the experts' gradients by 1/ep, so that an average over the ranks which hold the same experts
completes them (layers/mlp.py, scale_gradient).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from moeverify.case.schema import MoE
from moeverify.model.megablocks.losses import OwnLosses


def collect_own_losses(model: nn.Module, spec: MoE, num_shares: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that gives a micro-batch's part of the package's own balance and z losses.

    `num_shares` is how many micro-batches of all ranks the mean is taken over.
    """
    own = OwnLosses(model, spec)

    def collect() -> tuple[Tensor, Tensor]:
        balance, z = own.collect()  # means over the tokens of this rank and micro-batch, () both
        return balance / num_shares, z / num_shares

    return collect
