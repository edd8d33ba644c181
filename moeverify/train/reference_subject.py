"""The reference model as the subject of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from moeverify.cases.schema import Recipe, ReferenceModel
from moeverify.model.float8 import convert
from moeverify.model.transformer import Transformer
from moeverify.train.data import MicroBatch, Share, make_batch
from moeverify.train.forward import reference_losses
from moeverify.train.gradient_parts import ReferenceParts
from moeverify.train.objective import Losses, Normalizers
from moeverify.train.subject import Run


class ReferenceSubject:
    """The reference transformer; see `moeverify.train.subject.TestedModel`."""

    can_replay = True

    def __init__(self, recipe: Recipe, model: ReferenceModel) -> None:
        self.recipe = recipe
        self.model = model

    def build(self, device: torch.device, dtype: torch.dtype, *, experts: str = "loop") -> nn.Module:
        """Return the whole model, whose parameters are NaN until `moeverify.train.assemble.fill_shards`."""
        model = Transformer(self.model, experts=experts, dtype=dtype, device=device)
        convert(model, self.recipe.float8)
        return model

    def make_batch(self, step: int, share: Share, device: torch.device) -> MicroBatch:
        """Return a share of the synthetic batch."""
        return make_batch(self.recipe.data, self.model.vocab_size, self.recipe.seed, step, share, device)

    def compute_losses(
        self, run: Run, batch: MicroBatch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        """Return the cross entropy, balance and z losses; see `moeverify.train.objective`."""
        return reference_losses(self.model.moe, run, batch, normalizers)

    def count_experts(self, name: str, shape: Sequence[int]) -> int:
        """Return the number of experts for stacked expert weights (E, ...), else 0."""
        num_experts = 0 if self.model.moe is None else self.model.moe.num_experts
        return num_experts if ".experts." in name and tuple(shape[:1]) == (num_experts,) else 0

    def surround(self) -> AbstractContextManager[object]:
        """Return no context: goldens use `experts: loop`, and `grouped_mm` is rejected in float64."""
        return nullcontext()

    def split_gradient(self, run: Run, batch: MicroBatch) -> ReferenceParts:
        """Return the parts of the gradient, for the terms `lm`, `balance` and `z`."""
        return ReferenceParts(run, self.model.moe, batch, self.recipe.data.batch)
