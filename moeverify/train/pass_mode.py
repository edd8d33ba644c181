"""A torch function mode that stays active in backward passes, where checkpointed layers run again.

torch takes a mode off its stack while the mode handles a call. `Tensor.backward` is such a call, so that the
operators of the whole backward pass would escape the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_ENGINE = "_engine_run_backward"  # the function of torch.autograd that enters its engine


class PassMode(TorchFunctionMode):
    """A mode around forward and backward passes, in which subclasses change operators or their results.

    `__torch_function__` itself calls the operator: a frame of that name is skipped where the line of the user's
    code is looked up.
    """

    def substitute(self, func: Any, args: Sequence[Any]) -> Callable[..., Any]:
        """Return the function to call instead of an operator."""
        called: Callable[..., Any] = func
        return called

    def finish(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return the result of an operator, or another one."""
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle a call of torch's functions."""
        kwargs = kwargs or {}
        if func in _BACKWARD:
            with self._active_in_engine():
                return func(*args, **kwargs)
        return self.finish(func, args, kwargs, self.substitute(func, args)(*args, **kwargs))

    @contextmanager
    def _active_in_engine(self) -> Iterator[None]:
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
