"""Observer that reads modules and captures wrong tensors in one step of a diagnosis rerun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moeverify.explain.fitting.capture import Capture
from moeverify.parallel.regions.region import Region
from moeverify.train.module_taps import Tap


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
