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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

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


class _Replaced(torch.autograd.Function):
    """Other values in the place of some, and in the place of their gradient what `change` makes of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, others: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return others

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.change(gradients[0]), None, None


class _ForcedBlocks(Watch[None]):
    """Shows what goes from block to block, and its gradient; where there is a golden, the golden's goes on."""

    def __init__(self, training: Training, observer: Observer) -> None:
        self._training = training
        self._observer = observer
        self._step = 0
        tp = training.coordinates.get("tp", 0)
        self._ends = BlockEnds(training.program, training.recipe.data, tp, self._take, embeds=True)

    def begin_step(self, step: int) -> None:
        self._step = step
        self._ends.begin_step()

    def close(self) -> None:
        self._ends.close()

    def _take(self, end: str, values: Tensor, region: Region) -> Tensor:
        if is_partial(values):
            return values
        step, maker, taker = self._step, f"{end} {OUTPUT}", f"{self._name_next(end)} {GRADIENT}"
        self._observer.observe(step, KIND, maker, local_part(values.detach()), region)

        def pass_back(gradient: Tensor) -> Tensor:
            local = local_part(gradient)
            self._observer.observe(step, KIND, taker, local / self._training.program.scale, region)
            return self._read(step, taker, region, gradient, self._training.program.scale)

        forced: Tensor = _Replaced.apply(values, self._read(step, maker, region, values), pass_back)  # type: ignore[no-untyped-call]
        return forced

    def _read(self, step: int, name: str, region: Region, like: Tensor, scale: float = 1.0) -> Tensor:
        """Return the golden's values as a tensor like one of the run's, or that one where there is none."""
        golden = self._training.golden
        known = None if golden is None else golden.read(step, KIND, name, region)
        if known is None:
            return like
        local = local_part(like)
        values = (known.to(torch.float64) * scale).reshape(local.shape).to(local.device, local.dtype)
        if not isinstance(like, DTensor):
            return values
        shape, stride = like.shape, like.stride()
        return DTensor.from_local(
            values, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
        )

    def _name_next(self, end: str) -> str:
        """Return what takes the values at an end, and passes their gradient back."""
        model = self._training.recipe.model.reference
        assert model is not None
        number = 0 if end == EMBEDDING else int(end.rpartition(".")[2]) + 1
        return f"layers.{number}" if number < model.num_layers else HEAD


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
