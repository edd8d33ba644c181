"""One device's model in a step with what it read at its modules: what experts and the loss should compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeverify.diagnose.cross_entropy.formula import CrossEntropyFormula
from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.routed.exchange import Call, keep_whole
from moeverify.diagnose.routed.experts import RoutedExperts
from moeverify.model.moe import MoE
from moeverify.train.module_taps import FORWARD, Reading

_DISPATCHER = ".dispatcher"  # of a block of experts, as a tap calls what it reads there


@dataclass(frozen=True)
class RightModules:
    """One device's model with the weights that the step began with, and what it read at its modules in the step.

    `labels` (B, S) are those of the batch, `calls` the exchanges of token copies, none where these are not known.
    """

    model: nn.Module
    readings: Sequence[Reading]
    labels: Tensor | None = None
    calls: Sequence[Call] = ()

    def read(self, module: str, end: str) -> Tensor | None:
        """Return the first tensor that one device read forward at an end of a module."""
        wanted = (FORWARD, module, end, "0")
        for each in self.readings:
            if (each.direction, each.module, each.end, each.slot) == wanted:
                return each.local
        return None

    @torch.no_grad()
    def find_experts(self, origin: Origin) -> RoutedExperts | None:
        """Return the routed experts whose sum went wrong first; None where it is something else."""
        name = origin.culprit.removesuffix(_DISPATCHER)
        block = dict(self.model.named_modules()).get(name)
        x, came_in = self.read(origin.culprit, "input"), self.read(f"{name}.router", "input")
        is_sum = origin.direction == FORWARD and name != origin.culprit
        if not is_sum or x is None or came_in is None or not isinstance(block, MoE):
            return None
        routing = block.router(came_in)
        held, ids = block.experts.collect_weights(), routing.ids.flatten(0, 1)
        calls = keep_whole(self.calls, ids, held.gate.shape[0])
        return RoutedExperts(held, x.flatten(0, 1), ids, routing.weights.flatten(0, 1), calls)

    def make_cross_entropy(self) -> CrossEntropyFormula | None:
        """Return the formula of each token's loss; None where this rank has no head, or labels are not known."""
        logits = self.read("lm_head", "output")
        if logits is None or self.labels is None or logits.shape[:2] != self.labels.shape:
            return None
        return CrossEntropyFormula(logits, self.labels)
