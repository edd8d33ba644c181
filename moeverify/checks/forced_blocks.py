"""Whether each block computes and passes back what one device does, on the golden's own input and output gradient.

Rounding grows from block to block, and with it the bounds of all that comes later. Here what one block hands on to
the next is compared and then replaced by the golden's, and so is the gradient that the next one passes back. What is
left in an output, and in the gradient of a parameter, is the rounding of one block. The noise is measured in the same
way, so all bounds of the case become those of a single block.

A case asks for it by `checks.also: [forced_blocks]`: the golden then has an output (B, S, H) of each block and its
gradient for each step. An error does not reach another block than its own, so a run that is not forced stands beside
it, in float64, where rounding hides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moeverify.checks.base import Outcome, Role, Shown, Training, Watch
from moeverify.checks.golden_tensors import GoldenTensors
from moeverify.layout.observer import Observer
from moeverify.layout.placement import is_partial, local_part
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered
from moeverify.results.place import Place, Stage
from moeverify.train.block_ends import EMBEDDING, BlockEnds

KIND = CheckName.FORCED_BLOCKS
OUTPUT, GRADIENT = "output", "gradient of its input"
HEAD = "head"
"""What takes the last block's output."""


class _ForcedBlocks(Watch[None]):
    """Shows what goes from block to block, and its gradient; where there is a golden, the golden's goes on."""

    def __init__(self, training: Training, observer: Observer) -> None:
        self._training = training
        self._observer = observer
        self._step = 0
        tp = training.coordinates.get("tp", 0)
        self._ends = BlockEnds(training.program, training.recipe.data, tp, self._take, first=_name_block(0))

    def begin_step(self, step: int) -> None:
        self._step = step
        self._ends.begin_step()

    def close(self) -> None:
        self._ends.close()

    def _take(self, end: str, values: Tensor, region: Region) -> Tensor:
        if is_partial(values):
            return values
        step, scale = self._step, self._training.program.scale
        maker, taker = f"{end} {OUTPUT}", f"{self._name_next(end)} {GRADIENT}"
        self._observer.observe(step, KIND, maker, local_part(values.detach()), region)

        def pass_back(gradient: Tensor) -> Tensor:
            self._observer.observe(step, KIND, taker, local_part(gradient) / scale, region)
            return self._replace(gradient, step, taker, region, scale)

        passed = self._replace(values, step, maker, region)
        if passed.requires_grad:
            passed.register_hook(pass_back)  # type: ignore[no-untyped-call]
        return passed

    def _replace(self, values: Tensor, step: int, name: str, region: Region, scale: float = 1.0) -> Tensor:
        """Return a copy that has the golden's values in the dtype of these, with the same place in the graph."""
        golden = self._training.golden
        known = None if golden is None else golden.read(step, KIND, name, region)
        # A node that torch knows: pipelines that split a backward pass look at the graph.
        copy = values.clone()
        if known is not None:
            with torch.no_grad():
                local = local_part(copy)
                local.copy_((known.to(torch.float64) * scale).reshape(local.shape))
        return copy

    def _name_next(self, end: str) -> str:
        """Return what takes the values at an end, and passes their gradient back."""
        model = self._training.recipe.model.reference
        assert model is not None
        number = 0 if end == EMBEDDING else int(end.rpartition(".")[2]) + 1
        return _name_block(number) if number < model.num_layers else HEAD


def _name_block(number: int) -> str:
    return f"layers.{number}"


class ForcedBlocks(GoldenTensors):
    """Each block's output and the gradient of its input; an error in one is not in the next."""

    role = Role.ORIGIN

    def __init__(self) -> None:
        super().__init__(KIND, (KIND,))

    def show(self, training: Training, observer: Observer) -> Watch[None]:
        """Return what shows the ends of the blocks, and forces them; see `Check`."""
        return _ForcedBlocks(training, observer)

    def judge(self, shown: Shown, reports: Sequence[Any]) -> Outcome | None:
        """Return the verdict; every block that is wrong is so by itself; see `Check`."""
        outcome = super().judge(shown, reports)
        if outcome is None:
            return None
        return replace(outcome, findings=tuple(map(_place, sorted(outcome.findings, key=_order))))


def _split(name: str) -> tuple[str, str]:
    """Return the block of a tensor, and which of its ends it is."""
    block, _, end = name.partition(" ")
    return block, end


def _place(finding: Finding) -> Finding:
    """Return the finding with the block that made it wrong."""
    block, end = _split(finding.tensor)
    is_forward = end == OUTPUT
    place = Place(module=block, ranks=finding.ranks, stage=Stage.FORWARD if is_forward else Stage.BACKWARD)
    # A module's gradient is told of the module: the tensors that it may have are names of losses.
    subject = (
        Subject(quantity=Quantity.OUTPUT, tensors=(block,), module=block)
        if is_forward
        else Subject(quantity=Quantity.MODULE_GRADIENT, module=block)
    )
    cause = Cause.FORWARD if is_forward else Cause.BACKWARD
    explanation = Explanation(cause=cause, subject=subject, operation=Altered())
    return finding.model_copy(update={"code": cause.value, "explanation": explanation, "place": place})


def _order(finding: Finding) -> tuple[int, bool, list[tuple[int, str]]]:
    """Return step, direction and block, in the order of a step: forward from the first, backward from the last."""
    block, end = _split(finding.tensor)
    is_forward = end == OUTPUT
    numbers = [int(part) for part in re.split(r"[.]", block) if part.isdigit()]
    number = numbers[0] if numbers else (-1 if block == EMBEDDING else 1 << 30)
    return finding.step, not is_forward, [(number if is_forward else -number, block)]


CHECKS = (ForcedBlocks(),)
