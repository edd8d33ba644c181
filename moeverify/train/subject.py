"""The protocol of a model under test, for the reference model and for users' models.

A subject is created from a recipe (`moeverify.train.subjects.subject_of`) and knows no layout. It builds
the whole model, computes its losses and splits its gradient. The layout distributes the model over ranks
(`moeverify.train.assemble`), and an engine carries out the steps (`moeverify.train.engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.train.data import MicroBatch, Share
from moeverify.train.objective import GroupSums, Losses, Normalizers

Vector = dict[str, Tensor]
"""The gradient of one loss: float64 on the CPU, by logical parameter name."""


class Run(Protocol):
    """The part of a program on this rank that a subject may use (`moeverify.train.program.TrainingProgram`)."""

    @property
    def model(self) -> nn.Module:
        """Return the model under the layout."""

    @property
    def shards(self) -> Sequence[LocalShard]:
        """Return this rank's shards of the parameters."""

    @property
    def sums(self) -> GroupSums:
        """Return the sums of integers over the ranks of the layout."""

    @property
    def own_router_losses(self) -> Callable[[], tuple[Tensor, Tensor]] | None:
        """Return a function for this rank's balance and z loss, both (), if the experts' package computes them."""

    @property
    def loss_context(self) -> Callable[[], AbstractContextManager[object]]:
        """Return the factory of the context around losses and their backward pass."""


class GradientParts(Protocol):
    """The golden's gradient at one step on one device, split by loss term and by tokens.

    Losses are sums over tokens divided by counts of the global batch. The parts of all cells of a layout
    therefore add up to the golden. A cell is the tokens of one rank in one micro-batch.
    """

    def gradients(self, mask: Tensor) -> dict[str, Vector]:
        """Return, by loss term, the gradient of its sum over the valid tokens of a mask (B, S).

        It is normalized like the golden's gradient.
        """


class TestedModel(Protocol):
    """The model under test of a recipe."""

    @property
    def can_replay(self) -> bool:
        """Return whether its routers can replay the routing of a golden."""

    def build(self, device: torch.device, dtype: torch.dtype, *, experts: str = "loop") -> nn.Module:
        """Return the whole model on a device, ready to train.

        `dtype` is the dtype of the parameters and `experts` the backend of the reference experts. A user's
        model has its initial values, rounded to the recipe's precision. The reference model is filled
        later, when each rank knows its shards.

        Raises: CaseError when a user's code fails.
        """

    def make_batch(self, step: int, share: Share, device: torch.device) -> MicroBatch:
        """Return a share of the global batch of a step as the model's input."""

    def compute_losses(
        self, run: Run, batch: MicroBatch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        """Return this rank's part of each loss, and the detached cross entropy of each token (M, s).

        The second value is None if only a sum is known. Collective: the ranks of `run.sums`.

        Raises: CaseError when a user's model or loss returns an invalid value.
        """

    def count_experts(self, name: str, shape: Sequence[int]) -> int:
        """Return the number of experts that a logical tensor stacks along dim 0; 0 if unknown."""

    def surround(self) -> AbstractContextManager[object]:
        """Return the context of a micro-batch's forward and backward pass under any layout."""

    def split_gradient(self, run: Run, batch: MicroBatch) -> GradientParts:
        """Return the parts of the gradient of a whole batch, on one device, in float64."""
