"""Which micro-batch a forward pass is of.

A pipeline of torch that gets no shapes runs each stage once before the first micro-batch, to learn the shapes of
its results. The stage then gets zeros, uninitialized memory or the first micro-batch, and nothing is trained. A pass
without a graph, such as one for validation, trains nothing either.
Source: torch.distributed.pipelining.stage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

_STAGE = "torch.distributed.pipelining.stage"
_FORWARD = "forward_one_chunk"
_NUMBER = "fwd_chunk_id"


class Passes:
    """Numbers the forward passes of roots: the model, or each stage of a pipeline.

    `num_begun` has the number of passes that belong to a micro-batch, by the id of the root.
    """

    def __init__(self) -> None:
        self.num_begun: dict[int, int] = {}
        self._current: dict[int, int | None] = {}

    def begin(self, root: Any) -> None:
        """Note that a forward pass of a root begins."""
        key = id(root)
        count = self.num_begun.get(key, 0)
        chunk = find_chunk()
        is_none = is_trial_pass() or is_in_backward() or not torch.is_grad_enabled()
        self._current[key] = None if is_none else count if chunk is None else chunk
        if not is_none:
            self.num_begun[key] = count + 1

    def number(self, root: Any) -> int | None:
        """Return the micro-batch of the pass that a root has begun last; None if it belongs to none.

        Stages of a user's own pipeline may have no common root that is called: torch then says which one it is.
        """
        if id(root) in self._current:
            return self._current[id(root)]
        return None if is_trial_pass() else find_chunk() or 0


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass of autograd, where a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def is_trial_pass() -> bool:
    """Return whether torch's pipeline runs a stage, or its loss, only to learn shapes."""
    frames = list(_list_stage_frames())
    return bool(frames) and not is_in_backward() and not any(map(_is_forward, frames))


def find_chunk() -> int | None:
    """Return the micro-batch that torch's pipeline is running forward; None outside of a pipeline."""
    number = next((frame.f_locals.get(_NUMBER) for frame in _list_stage_frames() if _is_forward(frame)), None)
    return number if isinstance(number, int) else None


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name == _FORWARD


def _list_stage_frames() -> Iterator[FrameType]:
    if _STAGE not in sys.modules:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _STAGE:
            yield frame
        frame = frame.f_back
