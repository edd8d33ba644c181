"""CUDA graphs simulated on a rank without a GPU, for `--fault graph_stand_ins:NAME`.

A launch runs the captured function again on the captured tensors, and overwrites the results of the launch
before. Code that keeps an old result and takes it for the new one is detected, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeverify.faults.patch import Original, Patch
from moeverify.train import micro_batch_graph
from moeverify.train.micro_batch_graph import FixedWeights

NUM_WARMUPS = 2


def play(patch: Patch) -> None:
    """Run graph launches on the CPU."""
    kept: dict[int, Any] = {}

    @patch.wrap(micro_batch_graph.run_passes)
    def run_passes(original: Original[Any], inputs: Any, run: Any, batch: Any, normalizers: Any) -> Any:
        shown = original(inputs, run, batch, normalizers)
        if id(batch) in kept:
            for old, new in zip(_list_tensors(kept[id(batch)]), _list_tensors(shown), strict=True):
                old.copy_(new)
        return kept.setdefault(id(batch), shown)

    @patch.wrap(micro_batch_graph.capture)
    def capture(original: Original[Any], function: Callable[[], None], device: torch.device) -> Any:
        for _ in range(NUM_WARMUPS):
            function()
        return function


def play_with_stale_weights(patch: Patch) -> None:
    """The same, with weights that were gathered in the first step only."""
    play(patch)

    @patch.wrap(FixedWeights.refresh)
    def refresh(original: Original[None], self: FixedWeights, gathered: Any) -> None:
        if not hasattr(self, "was_refreshed"):
            original(self, gathered)
        self.was_refreshed = True  # type: ignore[attr-defined]


def play_without_zeroing(patch: Patch) -> None:
    """The same, with gradients that also hold those of the capture and of earlier steps."""
    play(patch)

    @patch.wrap(FixedWeights.zero_gradients)
    def zero_gradients(original: Original[None], self: FixedWeights) -> None:
        pass


def _list_tensors(shown: Any) -> list[Tensor]:
    losses = [shown.losses.lm, shown.losses.balance, shown.losses.z, shown.token_loss]
    return [*losses, *(value for record in shown.records for value in record)]
