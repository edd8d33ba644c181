"""What a training run shows to whoever watches it: local values with their region of a logical tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
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


Named = tuple[str, Tensor | None, Region]
"""A local tensor with the name of its logical tensor and its region."""


@runtime_checkable
class BulkObserver(Observer, Protocol):
    """An observer that takes all tensors of one kind in a few launches, where one by one each costs some.

    With a model in many small shards the host would else be busy with them for longer than a GPU trains.
    """

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        """Take local tensors of one kind, as `observe` takes each."""


def show_all(observer: Observer, step: int, kind: str, shown: Sequence[Named]) -> None:
    """Show tensors of one kind to an observer: together where it can, else one by one, in the same order."""
    if isinstance(observer, BulkObserver):
        observer.observe_all(step, kind, shown)
        return
    for name, local, region in shown:
        observer.observe(step, kind, name, local, region)


@torch.no_grad()
def copy_all(tensors: Sequence[Tensor], *, contiguous: bool = False) -> list[Tensor]:
    """Return a copy of each, in one launch for many of one dtype; with the strides that it has, or row by row."""
    layout = torch.contiguous_format if contiguous else torch.preserve_format
    copies = [torch.empty_like(tensor, memory_format=layout) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies
