"""One matrix product after the other, expert by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.model.expert_backends import ExpertBackend

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.model.expert_backends import Multiply
    from moeverify.model.expert_weights import ExpertWeights


def swiglu_loop(x: Tensor, counts: Tensor, weights: ExpertWeights) -> Tensor:
    """Return down_e(silu(gate_e(x)) * up_e(x)) for the rows of each expert e, one expert at a time.

    An expert without rows is computed too, so that its gradient is zero instead of missing.

    Shapes: x (M, H) sorted by expert, counts (E) int64 that sum to at most M.
    Returns: (M, H), zero after the experts' rows.
    """
    import torch
    from torch.nn import functional

    num_experts = len(weights.gate)
    # unbind instead of indexing: its backward stacks, while E indexing operations would add E full-size
    # tensors.
    gates, ups, downs = weights.gate.unbind(), weights.up.unbind(), weights.down.unbind()
    gate_biases, up_biases, down_biases = (
        [None] * num_experts if bias is None else bias.unbind()
        for bias in (weights.gate_bias, weights.up_bias, weights.down_bias)
    )
    outputs = []
    sizes = counts.tolist()
    *by_expert, filling = torch.split(x, [*sizes, len(x) - sum(sizes)])
    for expert, rows in enumerate(by_expert):
        gated = functional.silu(functional.linear(rows, gates[expert], gate_biases[expert]))
        inner = gated * functional.linear(rows, ups[expert], up_biases[expert])
        outputs.append(functional.linear(inner, downs[expert], down_biases[expert]))
    return torch.cat([*outputs, torch.zeros_like(filling)] if len(filling) else outputs)


class _Loop(ExpertBackend):
    @property
    def multiply(self) -> Multiply:
        return swiglu_loop


IMPLEMENTATION = _Loop()
