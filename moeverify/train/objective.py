"""The loss of the global batch as a sum of contributions from each rank.

With V valid tokens in the global batch, B rows, T_b valid tokens of row b, E experts, k of them per token:

    lm      = 1/V * sum over valid tokens of the cross entropy
    balance = coef * E/k * sum over layers of
              sequence scope: 1/B * sum_b sum_e counts[b,e]/T_b * probability_sum[b,e]/T_b
              batch scope:    sum_e counts[e]/V * probability_sum[e]/V      (sums over the batch)
    z       = coef * 1/V * sum over layers and valid tokens of logsumexp(router logits)^2

`counts` carries no gradient. Each term is therefore linear in the contribution of a token, and a rank needs
only integer sums from other ranks. Sources: Switch Transformer (arXiv 2101.03961, eq. 4), DeepSeek-V3
(arXiv 2412.19437, eq. 17-20) for the sequence scope, ST-MoE (arXiv 2202.08906, eq. 5) for z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.cases.schema import MoE
from moeverify.model.router import RouterStats
from moeverify.seams import seam
from moeverify.train.data import MicroBatch

SumOverRanks = Callable[[Tensor], Tensor]


def keep(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged: the sum over ranks of a single device."""
    return tensor


@dataclass(frozen=True)
class GroupSums:
    """Functions that sum a tensor over groups of ranks.

    `over_batch`: ranks whose losses add up. `over_sequence`: ranks with other positions of the same rows.
    `over_tokens`: ranks whose routers see other tokens, including tp ranks where tp slices tokens.
    """

    over_batch: SumOverRanks = keep
    over_sequence: SumOverRanks = keep
    over_tokens: SumOverRanks = keep


@dataclass(frozen=True)
class Normalizers:
    """Denominators of the losses of one step. Units: tokens and rows of the global batch."""

    num_valid: Tensor
    num_rows: int


@dataclass(frozen=True)
class Losses:
    """This rank's part of each global loss (); `own` has the terms of `lm` that a user's loss names."""

    lm: Tensor
    balance: Tensor
    z: Tensor
    own: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def total(self) -> Tensor:
        """Return the part of the loss that is differentiated, ()."""
        return self.lm + self.balance + self.z

    def detach(self) -> Losses:
        """Return the same values without their autograd graph."""
        own = {name: value.detach() for name, value in self.own.items()}
        return Losses(self.lm.detach(), self.balance.detach(), self.z.detach(), own)

    @seam
    def named(self) -> dict[str, Tensor]:
        """Return the detached parts (), by name, the total first."""
        return {
            "total": self.total.detach(),
            "lm": self.lm.detach(),
            "balance": self.balance.detach(),
            "z": self.z.detach(),
            **{name: value.detach() for name, value in self.own.items()},
        }


@seam
def count_valid(batches: Sequence[MicroBatch], sums: GroupSums, num_rows: int) -> Normalizers:
    """Return the normalizers of a step for this rank's micro-batches. Collective: all ranks of the loss."""
    local = torch.stack([batch.valid.sum() for batch in batches]).sum()
    return Normalizers(sums.over_batch(local), num_rows)


@seam
def router_losses(
    spec: MoE,
    routers: Sequence[RouterStats],
    batch: MicroBatch,
    normalizers: Normalizers,
    sums: GroupSums,
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the balance and z losses (), summed over the layers.

    Collective: the ranks of `sums`, once for all layers.
    """
    if not routers:
        zero = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
        return zero, zero
    # Stack all L layers: the number of kernel launches per micro-batch then does not grow with L.
    layers = RouterStats(*(torch.stack(each) for each in zip(*routers, strict=True)))
    balance = _balance(spec, layers, batch, normalizers, sums)
    z = (layers.z_sum / normalizers.num_valid).to(torch.float64).sum()
    return spec.balance_coef * balance, spec.z_coef * z


def _balance(
    spec: MoE, layers: RouterStats, batch: MicroBatch, normalizers: Normalizers, sums: GroupSums
) -> Tensor:
    # counts (L, M, E) and probability_sum (L, M, E) of this rank's tokens. A product of two sums over
    # tokens is not a sum over tokens. It becomes one because the counts, which carry no gradient, are first
    # summed over the ranks with other tokens of the same scope. Each rank then multiplies them by its own
    # probabilities.
    weight, dtype = spec.num_experts / spec.top_k, layers.probability_sum.dtype
    if spec.balance_scope == "batch":
        counts = sums.over_batch(layers.counts.sum(dim=1)).to(dtype)  # (L, E)
        share = counts / normalizers.num_valid
        parts = (share * layers.probability_sum.sum(dim=1) / normalizers.num_valid).sum(dim=1)
    else:
        # (M, 1): all valid tokens of the row, including positions on other ranks.
        length = batch.row_valid[:, None].to(dtype)
        share = sums.over_sequence(layers.counts).to(dtype) / length
        parts = (share * layers.probability_sum / length).sum(dim=(1, 2)) / normalizers.num_rows
    # (L) in float64 for any model dtype: terms of many layers are summed and compared to 1e-10.
    return (weight * parts).to(torch.float64).sum()
