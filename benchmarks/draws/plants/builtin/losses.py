"""Balance and z losses, masks of tokens, and the tied head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moeverify.faults.patch import Patch


def transformers_43775(patch: Patch) -> None:
    """The balance loss is not divided by the number of choices."""
    from moeverify.train import objective

    @patch.wrap(objective.router_losses)
    def losses(
        original: Any, spec: Any, routers: Sequence[Any], batch: Any, normalizers: Any, sums: Any
    ) -> Any:
        undivided = spec.model_copy(update={"top_k": 1})  # plant: transformers-43775
        return original(undivided, routers, batch, normalizers, sums)


def hyperparallel_752(patch: Patch) -> None:
    """The balance loss uses the mean score of the chosen experts for each of them."""
    from torch import Tensor

    from moeverify.model import router

    @patch.wrap(router.summarize)
    def summarize(original: Any, logits: Tensor, probabilities: Tensor, ids: Tensor, valid: Tensor) -> Any:
        chosen = probabilities.gather(-1, ids).mean(-1, keepdim=True)  # plant: hyperparallel-752
        return original(logits, chosen.expand_as(probabilities), ids, valid)  # plant: hyperparallel-752


def transformers_28021(patch: Patch) -> None:
    """The balance loss uses a softmax of the chosen logits."""
    import torch
    from torch import Tensor

    from moeverify.model import router

    @patch.wrap(router.summarize)
    def summarize(original: Any, logits: Tensor, probabilities: Tensor, ids: Tensor, valid: Tensor) -> Any:
        chosen = logits.gather(-1, ids).softmax(-1)  # plant: transformers-28021
        spread = torch.zeros_like(probabilities).scatter(-1, ids, chosen)
        return original(logits, spread, ids, valid)


def megatron_1438(patch: Patch) -> None:
    """The balance loss uses a softmax although the router uses sigmoids."""
    from torch import Tensor

    from moeverify.model import router

    @patch.wrap(router.summarize)
    def summarize(original: Any, logits: Tensor, probabilities: Tensor, ids: Tensor, valid: Tensor) -> Any:
        return original(logits, logits.softmax(-1), ids, valid)  # plant: megatron-1438


def ltp_68(patch: Patch) -> None:
    """The counts of a global balance loss are never summed over the ranks."""
    from moeverify.train import objective

    @patch.wrap(objective.router_losses)
    def losses(
        original: Any, spec: Any, routers: Sequence[Any], batch: Any, normalizers: Any, sums: Any
    ) -> Any:
        alone = replace(sums, over_batch=objective.keep)  # plant: ltp-68
        return original(spec, routers, batch, normalizers, alone)


def verl_6609(patch: Patch) -> None:
    """The router's losses are multiplied by the rank's number of tokens, under context parallelism."""
    from moeverify.train import objective

    @patch.wrap(objective.router_losses)
    def losses(
        original: Any, spec: Any, routers: Sequence[Any], batch: Any, normalizers: Any, sums: Any
    ) -> Any:
        balance, z = original(spec, routers, batch, normalizers, sums)
        tokens = batch.valid.sum()
        return balance * tokens, z * tokens  # plant: verl-6609


def bridge_4660(patch: Patch) -> None:
    """Padding is identified by its token, which also ends texts."""
    from torch import Tensor

    from moeverify.model.transformer import Transformer

    @patch.wrap(Transformer.forward)
    def forward(
        original: Any, self: Any, tokens: Tensor, positions: Tensor | None = None, valid: Tensor | None = None
    ) -> Any:
        if valid is not None and not tokens.is_floating_point():
            valid = valid & (tokens != 7)  # plant: bridge-4660
        return original(self, tokens, positions, valid)


def verl_7834(patch: Patch) -> None:
    """The tied head is a copy instead of an alias: its gradient for the embedding is lost."""
    from torch import Tensor
    from torch.nn import functional

    from moeverify.model.transformer import TiedHead

    @patch.replace(TiedHead.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        return functional.linear(x, self._embed[0].weight.detach())  # plant: verl-7834
