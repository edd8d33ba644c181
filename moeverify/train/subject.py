"""The model under test, whoever wrote it, behind one protocol.

A subject is made of a recipe (`moeverify.train.subjects.subject_of`) and knows no layout. It builds the whole model,
says what its losses are, and takes its gradient apart. How a model is divided over ranks is said by the layout
(`moeverify.train.assemble`), and what carries out a step by an engine (`moeverify.train.engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from moeverify.layout.local_shard import LocalShard
from moeverify.train.data import Batch, Share
from moeverify.train.objective import Losses, Normalizers, Sums
from moeverify.train.routers import RouterView

Vector = dict[str, Tensor]
"""The gradient of one loss: by the logical names of parameters, float64, on the CPU."""


class Run(Protocol):
    """What a subject may ask of the program that runs it on this rank (`moeverify.train.program.Program`)."""

    @property
    def model(self) -> nn.Module:
        """Return the model as the layout has left it."""

    @property
    def shards(self) -> Sequence[LocalShard]:
        """Return this rank's shards of the parameters."""

    @property
    def sums(self) -> Sums:
        """Return how integers are summed over the ranks of the layout."""

    @property
    def own_router_losses(self) -> Callable[[], tuple[Tensor, Tensor]] | None:
        """Return what gives this rank's part of balance and z loss, if the experts' package computes them."""

    @property
    def loss_context(self) -> Callable[[], AbstractContextManager[object]]:
        """Return what makes the context around losses and their backward pass."""


class GradientParts(Protocol):
    """The golden's gradient at one step, taken apart by loss term and by tokens, on one device.

    Losses are sums over tokens divided by counts of the global batch, so the parts of all cells of a layout (what one
    rank sees in one micro-batch) add up to the golden.
    """

    def gradients(self, mask: Tensor) -> dict[str, Vector]:
        """Return, by loss term, the gradient of its sum over the valid tokens of a mask (B, S), as the golden's."""

    def gradients_by_layer(self) -> Sequence[dict[str, Vector]]:
        """Return, for each router in order, the gradient of its balance and z loss over all valid tokens.

        Empty where the losses of single routers are not known.
        """

    def gradients_by_use(self) -> Mapping[str, Vector]:
        """Return the gradient that comes through each use of a weight that has several, by the name of the use.

        Over all valid tokens and terms. Empty where there is no such weight, or where its uses are not known.
        """


class Subject(Protocol):
    """The model under test of one recipe."""

    @property
    def can_replay(self) -> bool:
        """Return whether its routers can be given the routing of a golden."""

    def build(self, device: torch.device, dtype: torch.dtype, *, experts: str = "loop") -> nn.Module:
        """Return the whole model on a device, ready to train.

        `dtype` is that of the parameters, `experts` the backend of experts that moeverify computes. A user's model
        has its initial values, rounded to the recipe's precision; those of the reference model are filled in later,
        where each rank knows what it stores.

        Raises: CaseError where a user's code fails.
        """

    def find_routers(self, model: nn.Module) -> list[RouterView]:
        """Return the routers of the model, however it is divided, that can be seen, in layer order."""

    def make_batch(self, step: int, share: Share, device: torch.device) -> Batch:
        """Return a share of the global batch of a step, in the form that the model takes."""

    def compute_losses(
        self, run: Run, batch: Batch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        """Return this rank's part of each loss, and the detached cross entropy of each token (M, s).

        The second value is None where only a sum is known. Collective: the ranks that `run.sums` reaches.

        Raises: CaseError where a user's model or loss returns what it should not.
        """

    def count_experts(self, name: str, shape: Sequence[int]) -> int:
        """Return how many experts a logical tensor stacks along dim 0; 0 where that is unknown."""

    def surround(self) -> AbstractContextManager[object]:
        """Return the context of a micro-batch's forward and backward pass, whatever the layout."""

    def split_gradient(self, run: Run, batch: Batch) -> GradientParts:
        """Return the parts of the gradient of a whole batch, on one device, in float64."""
