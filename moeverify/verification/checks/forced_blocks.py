"""Check each block's forward and backward pass on the golden's own inputs and output gradients.

Rounding grows from block to block, and the bounds of later blocks grow with it. This check compares the
output of each block and then replaces it by the golden's. The same holds for the gradient of each block's
input. The remaining error of an output, or of a parameter's gradient, is the rounding of one block. The
noise is measured in the same way, so all bounds of the case become bounds of a single block.

The check is optional (`checks.also: [forced_blocks]`), because it adds the output (B, S, H) of each block
and its gradient to the golden, at each step. An error does not propagate to other blocks. A second run in
float64 is therefore not forced; rounding hides nothing there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moeverify.parallel.regions.observer import Observer
from moeverify.parallel.regions.placement import is_partial, local_part
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered
from moeverify.results.place import Place, Stage
from moeverify.train.block_ends import EMBEDDING
from moeverify.train.module_taps import hook_gradient
from moeverify.verification.checks.activations import BlockWatch
from moeverify.verification.checks.base import CheckOutcome, Role, ShownTensors, Training, Watch
from moeverify.verification.checks.golden_tensors import GoldenTensors

KIND = CheckName.FORCED_BLOCKS
OUTPUT, GRADIENT = "output", "gradient of its input"
HEAD = "head"
"""Name of the module that takes the last block's output."""


class _ForcedBlocks(BlockWatch):
    """Shows values between blocks and their gradients, and replaces them by the golden's if there is one."""

    def _take(self, name: str, value: Tensor, region: Region) -> Tensor:
        # The golden has the sum, with which a summand cannot be compared.
        if is_partial(value):
            return value
        step, scale = self._step, self._training.program.scale
        maker, taker = f"{name} {OUTPUT}", f"{self._name_next(name)} {GRADIENT}"
        self._observer.observe(step, KIND, maker, local_part(value.detach()), region)

        def pass_back(gradient: Tensor) -> Tensor:
            self._observer.observe(step, KIND, taker, local_part(gradient) / scale, region)
            return self._replace(gradient, step, taker, region, scale)

        passed = self._replace(value, step, maker, region)
        if passed.requires_grad:
            hook_gradient(passed, pass_back)
        return passed

    def _replace(self, values: Tensor, step: int, name: str, region: Region, scale: float = 1.0) -> Tensor:
        """Return a copy with the golden's values in the same dtype, and the same place in the graph."""
        golden = self._training.golden
        known = None if golden is None else golden.read(step, KIND, name, region)
        # Cloned, so that the graph has a standard node: pipelines that split a backward pass inspect the
        # graph.
        copy = values.clone()
        if known is not None:
            with torch.no_grad():
                local = local_part(copy)
                # In float64, so that the copy is the only rounding.
                local.copy_((known.to(torch.float64) * scale).reshape(local.shape))
        return copy

    def _name_next(self, end: str) -> str:
        """Return the name of the module that takes the values at an end and passes their gradient back."""
        model = self._training.recipe.model.reference
        assert model is not None
        number = 0 if end == EMBEDDING else int(end.rpartition(".")[2]) + 1
        return _name_block(number) if number < model.num_layers else HEAD


def _name_block(number: int) -> str:
    return f"layers.{number}"


class ForcedBlocks(GoldenTensors):
    """Output and input gradient of each block. An error in one block does not affect the next."""

    role = Role.ORIGIN

    def __init__(self) -> None:
        super().__init__(KIND, (KIND,))

    def show(self, training: Training, observer: Observer) -> Watch[None]:
        """Return a watch that shows the ends of the blocks and forces them; see `Check`."""
        return _ForcedBlocks(training, observer, first=_name_block(0))

    def judge(self, shown: ShownTensors, reports: Sequence[Any]) -> CheckOutcome | None:
        """Return the verdict. Each wrong block is a finding of its own; see `Check`."""
        outcome = super().judge(shown, reports)
        if outcome is None:
            return None
        return replace(outcome, findings=tuple(map(place_finding, sorted(outcome.findings, key=_order))))


def _split(name: str) -> tuple[str, str]:
    """Return the block and the end that a tensor's name refers to."""
    block, _, end = name.partition(" ")
    return block, end


def place_finding(finding: Finding) -> Finding:
    """Return a finding about an end of a block or module with the place that caused it."""
    block, end = _split(finding.tensor)
    is_forward = end == OUTPUT
    place = Place(module=block, ranks=finding.ranks, stage=Stage.FORWARD if is_forward else Stage.BACKWARD)
    # The gradient belongs to the module. `Subject.tensors` would be names of losses.
    subject = (
        Subject(quantity=Quantity.OUTPUT, tensors=(block,), module=block)
        if is_forward
        else Subject(quantity=Quantity.MODULE_GRADIENT, module=block)
    )
    cause = Cause.FORWARD if is_forward else Cause.BACKWARD
    explanation = Explanation(cause=cause, subject=subject, operation=Altered())
    return finding.model_copy(update={"code": cause.value, "explanation": explanation, "place": place})


def _order(finding: Finding) -> tuple[int, bool, list[tuple[int, str]]]:
    """Return step, direction and block as a sort key: forward passes first to last, then backward passes."""
    block, end = _split(finding.tensor)
    is_forward = end == OUTPUT
    numbers = [int(part) for part in re.split(r"[.]", block) if part.isdigit()]
    number = numbers[0] if numbers else (-1 if block == EMBEDDING else 1 << 30)
    return finding.step, not is_forward, [(number if is_forward else -number, block)]


CHECKS = (ForcedBlocks(),)
