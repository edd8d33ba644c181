"""The gradient of a batch on one device, split by loss term and by tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.cases.schema import MoE
from moeverify.model.router import RouterStats
from moeverify.model.transformer import ModelOutput
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.train.data import IGNORED, MicroBatch
from moeverify.train.forward import cross_entropy
from moeverify.train.objective import GroupSums, Normalizers, router_losses
from moeverify.train.subject import Run, Vector


def differentiate(loss: Tensor, shards: Sequence[LocalShard]) -> Vector:
    """Return the gradient of a loss () by parameter name; zero for frozen and unused parameters."""
    # autograd rejects a frozen parameter even with allow_unused.
    trained = [shard for shard in shards if shard.tensor.requires_grad] if loss.requires_grad else []
    parameters = [shard.tensor for shard in trained]
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) if trained else ()
    found = {shard.name: gradient for shard, gradient in zip(trained, gradients, strict=True)}
    vector: Vector = {}
    for shard in shards:
        gradient = found.get(shard.name)
        vector[shard.name] = _bring(torch.zeros_like(shard.tensor) if gradient is None else gradient)
    return vector


def _bring(tensor: Tensor) -> Tensor:
    """Return a float64 copy on the CPU, where a fit expects golden parts and the ranks' shards."""
    return tensor.detach().to("cpu", torch.float64)


class ReferenceParts:
    """The parts of the reference model's gradient; see `moeverify.train.subject.GradientParts`.

    Shapes: masks (B, S); the batch is whole.
    """

    def __init__(self, run: Run, moe: MoE | None, batch: MicroBatch, num_rows: int) -> None:
        self.run = run
        self.moe = moe
        self.batch = batch
        self.normalizers = Normalizers(batch.valid.sum(), num_rows)
        # The balance loss always uses the counts of the whole batch: they carry no gradient, and a rank
        # that computes its share gets their sum over ranks.
        with torch.no_grad():
            self.counts = [stats.counts for stats in self._forward(batch.valid).routers]

    def gradients(self, mask: Tensor) -> dict[str, Vector]:
        """Return the gradient of each term's sum over the valid tokens of a mask (B, S)."""
        output = self._forward(mask)
        loss = cross_entropy(output.logits, self.batch.targets.masked_fill(~mask, IGNORED))
        found = {"lm": differentiate(loss.sum() / self.normalizers.num_valid, self.run.shards)}
        zero = {name: torch.zeros_like(value) for name, value in found["lm"].items()}
        if self.moe is None:
            return found | {"balance": zero, "z": zero}
        stats = [
            RouterStats(part.probability_sum, counts, part.z_sum)
            for part, counts in zip(output.routers, self.counts, strict=True)
        ]
        balance, z = router_losses(self.moe, stats, self.batch, self.normalizers, GroupSums())
        terms = {"balance": balance, "z": z}
        return found | {name: differentiate(term, self.run.shards) for name, term in terms.items()}

    def _forward(self, mask: Tensor) -> ModelOutput:
        output: ModelOutput = self.run.model(self.batch.tokens, self.batch.positions, mask)
        return output
