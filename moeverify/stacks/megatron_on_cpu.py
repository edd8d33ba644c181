"""Stand-ins for what megatron-core asks of CUDA by name, so that its parallel code runs on CPUs over gloo.

Seen in 0.16.1: devices (`torch.cuda.current_device()` in tensor_parallel/layers.py, `device="cuda"` in
optimizer/clip_grads.py), streams (transformer/moe/token_dispatcher.py makes one for copies to the host), states of
random numbers (tensor_parallel/random.py), and names of types (optimizer/distrib_optimizer.py and
transformer/module.py compare `type()` with "torch.cuda.FloatTensor"). Nothing that is computed or sent is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OneStream:
    """The only stream of a CPU: everything on it is done when its call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneStream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: object) -> None:
        """Return at once: there is nothing to wait for."""

    def record_event(self) -> OneStream:
        """Return what waits for nothing, as this stream does."""
        return self

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""


class CudaIsCpu(TorchFunctionMode):
    """Make tensors on the CPU where CUDA is named, and give the types of tensors the names that they have on CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with the CPU for its device."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


@contextmanager
def stand_in_for_cuda(device_type: str) -> Iterator[None]:
    """Let megatron-core run on the CPU while the block runs; on another device nothing is changed."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # 0.16.1 reads this name without TransformerEngine too, where it never sets it: a NameError in the router, forward
    # and backward. It is left set: backward passes on one device run outside this block.
    vars(moe_utils).setdefault("te_general_gemm", None)
    with ExitStack() as stack:
        if device_type == "cpu":
            names: dict[str, Callable[..., Any]] = {
                "current_device": lambda: "cpu",
                "Stream": OneStream,
                "stream": lambda stream: nullcontext(),
                "current_stream": OneStream,
                "get_rng_state": lambda *_: torch.get_rng_state(),
                "manual_seed": torch.manual_seed,
            }
            for name, stand_in in names.items():
                stack.enter_context(patch.object(torch.cuda, name, stand_in))
            stack.enter_context(
                patch.object(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
            )
            stack.enter_context(
                patch.object(
                    random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)
                )
            )
            stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _convert_splits))
            stack.enter_context(CudaIsCpu())
        yield


def _convert_splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return sizes for all-to-all as numpy where Megatron asks for it: its own function does so on CUDA only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
