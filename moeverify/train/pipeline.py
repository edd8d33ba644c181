"""Pipeline execution of a step's micro-batches, which a schedule orders instead of the plain loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.model.router import RouterRecord, RouterStats
from moeverify.parallel.pipeline import NUM_CARRIED, ModelStage
from moeverify.seams import seam
from moeverify.train.forward import cross_entropy
from moeverify.train.objective import Losses, router_losses
from moeverify.train.program import MicroBatchResult, StepInputs
from moeverify.train.routers import RouterView
from moeverify.train.routing import replay


def run_pipeline(inputs: StepInputs) -> Iterator[MicroBatchResult]:
    """Run a step's micro-batches forward and backward, then yield this rank's results of each.

    Ranks without the last stage have no losses. While a micro-batch is yielded, the routers hold its
    records. Collective: all ranks.
    """
    program, batches = inputs.program, inputs.batches
    assert program.pipeline is not None
    work = StageWork(**vars(inputs))
    with program.loss_context():
        program.pipeline.run(torch.cat([batch.tokens for batch in batches]), work)
    for number, batch in enumerate(batches):
        for router in program.routers:
            router.module.record = work.records[number, router.name]
        losses, token_loss = work.losses.get(number, (None, None))
        yield MicroBatchResult(batch, losses, token_loss)


@dataclass
class StageWork(StepInputs):
    """The computation of a step at this rank's stages; see `moeverify.parallel.pipeline.StepParts`.

    A schedule interleaves passes of several micro-batches, so router records are kept per micro-batch.
    """

    losses: dict[int, tuple[Losses, Tensor]] = field(default_factory=dict)
    records: dict[tuple[int, str], RouterRecord | None] = field(default_factory=dict)

    @seam
    def begin(self, stage: ModelStage, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return the positions and the valid mask of a micro-batch, both (M, s)."""
        batch = self.batches[micro_batch]
        if self.ids is not None:
            replay(self.recipe, self._routers(stage), batch, self.ids, self.step, self.program.device)
        return batch.positions, batch.valid

    @seam
    def add(
        self, stage: ModelStage, micro_batch: int, routers: Sequence[RouterStats], carried: Tensor | None
    ) -> Tensor:
        """Return the balance and z losses of all layers so far, (2,) float64."""
        for router in self._routers(stage):
            self.records[micro_batch, router.name] = router.module.record
        moe, batch = self.recipe.model.moe, self.batches[micro_batch]
        if carried is None:
            carried = torch.zeros(NUM_CARRIED, dtype=torch.float64, device=self.program.device)
        if moe is None or not routers:
            return carried + 0.0  # a stage must not return its input tensor
        own = router_losses(moe, routers, batch, self.normalizers, self.program.sums)
        return carried + torch.stack(own)

    @seam
    def loss(self, micro_batch: int, logits: Tensor, carried: Tensor) -> Tensor:
        """Return this rank's part of the loss () times the program's scale, and keep the loss terms."""
        token_loss = cross_entropy(logits, self.batches[micro_batch].targets)
        balance, z = carried.unbind()
        losses = Losses(token_loss.sum() / self.normalizers.num_valid, balance, z)
        total = losses.total * self.program.scale
        self.losses[micro_batch] = (losses.detach(), token_loss.detach())
        return total

    def _routers(self, stage: ModelStage) -> list[RouterView]:
        modules: set[object] = set(stage.modules())
        return [router for router in self.program.routers if router.module in modules]
