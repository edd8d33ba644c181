"""What a training run shows to whoever watches it: local values with their region of a logical tensor."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moeverify.layout.region import Region

INITIAL = -1  # the step of what exists before the first step


class Observer(Protocol):
    """Receives the tensors of a run; the golden's recorder and the layout's comparison are both observers."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Take one local tensor: `local` is `region` of the logical tensor `name` of this kind at this step.

        `local` has `region.local_shape` and may be changed by the run afterwards; None says that the run
        has no such tensor although it should (a gradient that never came).
        """

    def begin_step(self, step: int) -> None:
        """Hear that a step begins, before anything of it is computed."""
