"""A torch function mode that stays active in backward passes, where checkpointed layers run again.

torch takes a mode off its stack while the mode handles a call. `Tensor.backward` is such a call, so that the
operators of the whole backward pass would escape the mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Calls that a mode must make in `PassMode.active_in_engine`."""

_ENGINE = "_engine_run_backward"  # the function of torch.autograd that enters its engine


class PassMode(TorchFunctionMode):
    """A mode around forward and backward passes.

    `__torch_function__` of a subclass calls the function itself: the frame of that name is skipped where the
    line of the user's code is looked up.
    """

    @contextmanager
    def active_in_engine(self) -> Iterator[None]:
        """Put the mode back on the stack while torch is in its engine.

        A torch without this function of the engine runs the backward pass outside of the mode.
        """
        run = getattr(torch.autograd, _ENGINE, None)
        if run is None:
            yield
            return
        setattr(torch.autograd, _ENGINE, self._back_on_stack()(run))
        try:
            yield
        finally:
            setattr(torch.autograd, _ENGINE, run)

    @contextmanager
    def _back_on_stack(self) -> Iterator[None]:
        with self:
            yield
