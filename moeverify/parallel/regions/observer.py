"""The interface between a training run and its observers: local values with their regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region

INITIAL = -1  # the step number of tensors that exist before the first step


class Observer(Protocol):
    """Receiver of a run's tensors, such as the golden's recorder and the layout's comparison."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Receive one local tensor: `region` of the logical tensor `name` of this kind at this step.

        `local` has `region.local_shape`, and the run may modify it afterwards. None means that an expected
        tensor is missing, for example a gradient that was never computed.
        """

    def begin_step(self, step: int) -> None:
        """Receive the start of a step, before any of its computation."""


Named = tuple[str, Tensor | None, Region]
"""A local tensor with its logical name and region: (name, local, region)."""


@runtime_checkable
class BulkObserver(Observer, Protocol):
    """An observer that receives all tensors of one kind at once, in fewer kernel launches.

    With many small shards, one launch per tensor would keep the host busy for longer than the GPU trains.
    """

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        """Receive local tensors of one kind, each as in `observe`."""


def show_all(observer: Observer, step: int, kind: str, shown: Sequence[Named]) -> None:
    """Pass tensors of one kind to an observer, in bulk if it supports this, else one by one in order."""
    if isinstance(observer, BulkObserver):
        observer.observe_all(step, kind, shown)
        return
    for name, local, region in shown:
        observer.observe(step, kind, name, local, region)


@torch.no_grad()
def copy_all(tensors: Sequence[Tensor], *, contiguous: bool = False) -> list[Tensor]:
    """Return a copy of each tensor, in its shape, with one launch for many tensors of one dtype.

    Copies keep the strides of their source, or are row-major with `contiguous`.
    """
    layout = torch.contiguous_format if contiguous else torch.preserve_format
    copies = [torch.empty_like(tensor, memory_format=layout) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies
