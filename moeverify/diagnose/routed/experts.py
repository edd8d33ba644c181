"""The routed experts of one device, with the tokens that it gave them and where it sent these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeverify.diagnose.routed.exchange import Call
from moeverify.model.expert_weights import ExpertWeights


@dataclass(frozen=True)
class RoutedExperts:
    """Experts with `held` weights, the tokens x (N, H), their choices `ids` and combine `weights` (N, k).

    `calls` are the exchanges of the step, none where these are not known.
    """

    held: ExpertWeights
    x: Tensor
    ids: Tensor
    weights: Tensor
    calls: Sequence[Call] = ()

    @property
    def count(self) -> int:
        """Return the number of experts."""
        return self.held.gate.shape[0]

    @torch.no_grad()
    def compute_rows(self) -> Tensor:
        """Return what every expert makes of every token, (N, E, H), not weighted."""
        return torch.stack([self._run(expert) for expert in range(self.count)], dim=1)

    def _run(self, expert: int) -> Tensor:
        held = self.held
        gate, up = (
            functional.linear(self.x, weight[expert], None if bias is None else bias[expert])
            for weight, bias in ((held.gate, held.gate_bias), (held.up, held.up_bias))
        )
        bias = None if held.down_bias is None else held.down_bias[expert]
        return functional.linear(functional.silu(gate) * up, held.down[expert], bias)
