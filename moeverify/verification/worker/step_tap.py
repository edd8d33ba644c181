"""Observer of one step of a diagnosis rerun: module readings, on one device too, and wrong tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeverify.cases.schema import Recipe
from moeverify.explain.fitting.capture import Capture
from moeverify.parallel.regions.region import Region
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.module_taps import Reading, Tap
from moeverify.verification.golden.store import StoredGolden


class StepTap:
    """Observer that captures tensors and opens a tap on the model for one step.

    `num_before` is the value of `count`, the number of collectives issued, at the begin of that step.
    """

    def __init__(
        self,
        capture: Capture,
        tap: Tap,
        step: int,
        count: Callable[[], int] = lambda: 0,
    ) -> None:
        self.num_before = count()
        self._count = count
        self._capture = capture
        self._tap = tap
        self._step = step
        self._context: Any = None

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Capture a tensor; see `moeverify.parallel.regions.observer.Observer`."""
        self._capture.observe(step, kind, name, local, region)

    def begin_step(self, step: int) -> None:
        """Open the tap at the begin of the step of interest and close it at the next step."""
        if step == self._step:
            self.num_before = self._count()
            self._context = self._tap.reading()
            self._context.__enter__()
        elif self._context is not None:
            self.close()

    def close(self) -> None:
        """Close the tap."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


def read_golden_modules(
    recipe: Recipe, golden: StoredGolden, step: int, device: torch.device
) -> list[Reading]:
    """Return the module readings of the single-device model in `step`, starting from the golden's state.

    The model computes in float64. No collective.
    """
    program = assemble_single(recipe, device, compute="float64")
    batch = recipe.data
    tap = Tap(program.model, batch.batch, batch.seq_len, scale=1.0, limit=1 << 62)
    observer = StepTap(Capture(()), tap, step)
    train(recipe, program, observer, golden=golden, num_steps=step + 1)
    observer.close()
    return tap.readings
