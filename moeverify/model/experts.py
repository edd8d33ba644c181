"""The routed SwiGLU experts: their stacked weights.

The ways to multiply with them are in `moeverify.model.expert_backends`.

Letters: M token copies sorted by expert, E (local) experts, H hidden, F expert hidden (local).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moeverify.model.expert_backends import EXPERTS
from moeverify.model.expert_weights import ExpertWeights, PlacedRows
from moeverify.model.param_access import View, identity
from moeverify.model.precision import Factory


class ExpertHolder(nn.Module):
    """A module all of whose parameters are experts' weights.

    `gradient_share` is what its backward pass multiplies their gradients with: 1 unless it averages by itself. Where
    a placement says which experts are here, `row_blocks` names them, and data parallelism leaves them alone.
    """

    gradient_share: float = 1.0
    row_blocks: tuple[PlacedRows, ...] = ()


class DividesExperts:
    """A block whose own package spreads its experts over ranks, and lets tokens travel between them."""

    def divide_experts(self, group: ProcessGroup) -> nn.Module:
        """Leave this rank its experts of the group's, and return the module whose parameters are their stacked rows.

        The rows of each parameter must then be those of E/n consecutive experts: Shard(0) over the group.
        """
        raise NotImplementedError


class Experts(ExpertHolder):
    """The stacked weights of all routed experts that live here, multiplied by a backend of `layout.experts`.

    `view` turns each stored parameter into the tensor to compute with, and the number of experts is read off
    it. Where several ranks hold shards of F and add their outputs, all but one set `add_down_bias` to False.
    """

    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self, num_experts: int, hidden: int, expert_hidden: int, *, bias: bool, backend: str, factory: Factory
    ) -> None:
        super().__init__()
        chosen = EXPERTS.find(backend)
        chosen.check(factory["dtype"], hidden=hidden, expert_hidden=expert_hidden)
        assert chosen.multiply is not None
        self.core = chosen.multiply
        self.view: View = identity
        self.add_down_bias = True
        self.gate = nn.Parameter(torch.empty(num_experts, expert_hidden, hidden, **factory))
        self.up = nn.Parameter(torch.empty(num_experts, expert_hidden, hidden, **factory))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, expert_hidden, **factory))
        widths = {"gate_bias": expert_hidden, "up_bias": expert_hidden, "down_bias": hidden}
        for name, width in widths.items():
            value = nn.Parameter(torch.zeros(num_experts, width, **factory)) if bias else None
            self.register_parameter(name, value)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs (M, H) for x (M, H) sorted by expert, counts (E) rows for each."""
        return self.core(x, counts, self.collect_weights())

    def collect_weights(self) -> ExpertWeights:
        """Return the local tensors to compute with."""
        gate_bias, up_bias, down_bias = (
            None if bias is None else self.view(bias)
            for bias in (self.gate_bias, self.up_bias, self.down_bias)
        )
        if down_bias is not None and not self.add_down_bias:
            down_bias = down_bias * 0  # stays in the graph: its gradient here is zero, not missing
        return ExpertWeights(
            self.view(self.gate), self.view(self.up), self.view(self.down), gate_bias, up_bias, down_bias
        )
