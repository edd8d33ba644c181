"""The routed SwiGLU experts and their stacked weights.

`moeverify.model.expert_backends` has the implementations of their products.

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
    """A module whose parameters are all expert weights.

    `gradient_share` is the factor that its own backward pass applies to their gradients; it is 1 unless the
    module averages itself. `row_blocks` describes the local experts of an explicit placement; data
    parallelism then skips the module.
    """

    gradient_share: float = 1.0
    row_blocks: tuple[PlacedRows, ...] = ()


class DividesExperts:
    """A block whose own package distributes its experts over ranks and exchanges their tokens."""

    def divide_experts(self, group: ProcessGroup) -> nn.Module:
        """Keep only this rank's experts of the group, and return the module with their stacked parameters.

        The rows of each parameter must be those of E/n consecutive experts, i.e. Shard(0) over the n ranks.
        """
        raise NotImplementedError


class Experts(ExpertHolder):
    """The stacked weights of all local routed experts, multiplied by a backend of `layout.experts`.

    `view` maps each stored parameter to the tensor to compute with, which also determines the number of
    experts. Where several ranks hold shards of F and add their outputs, all but one set `add_down_bias` to
    False.
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
        """Return the outputs (M, H) for x (M, H) sorted by expert, with counts (E) rows per expert."""
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
