"""The gradient of a batch on one device, split by loss term and by tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moeverify.cases.schema import MoE
from moeverify.model.router import RouterStats
from moeverify.model.transformer import ModelOutput, TiedHead, Transformer
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

    def gradients_by_use(self) -> Mapping[str, Vector]:
        """Return the gradient through each use of a tied weight; see `GradientParts`."""
        model = self.run.model
        if not isinstance(model, Transformer) or not isinstance(model.lm_head, TiedHead) or not model.embed:
            return {}
        weight = model.embed.weight
        whole = _add_up(self.gradients(self.batch.valid))
        hook = model.lm_head.register_forward_hook(
            lambda _, args, output: functional.linear(args[0], weight.detach())
        )
        try:
            looked_up = _add_up(self.gradients(self.batch.valid))
        finally:
            hook.remove()
        return {"embedding": looked_up, "head": {name: whole[name] - looked_up[name] for name in whole}}

    def _forward(self, mask: Tensor) -> ModelOutput:
        output: ModelOutput = self.run.model(self.batch.tokens, self.batch.positions, mask)
        return output


def _add_up(terms: Mapping[str, Vector]) -> Vector:
    """Return the sum of the gradients of all terms."""
    names = next(iter(terms.values()))
    return {name: torch.stack([vector[name] for vector in terms.values()]).sum(dim=0) for name in names}
