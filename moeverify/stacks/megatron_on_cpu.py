"""Replacements for the CUDA features that megatron-core names, so that it runs on CPUs with gloo.

Required by 0.16.1: devices (`torch.cuda.current_device()` in tensor_parallel/layers.py, `device="cuda"` in
optimizer/clip_grads.py), streams (transformer/moe/token_dispatcher.py creates one for copies to the host),
random states (tensor_parallel/random.py), and type names (optimizer/distrib_optimizer.py and
transformer/module.py compare `type()` with "torch.cuda.FloatTensor"). Computed and communicated values do
not change.
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
    """The only stream of a CPU. Work on it is complete when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneStream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: object) -> None:
        """Return immediately: there is nothing to wait for."""

    def record_event(self) -> OneStream:
        """Return an event that needs no wait: this stream."""
        return self

    def synchronize(self) -> None:
        """Return immediately: there is nothing to wait for."""


class CudaIsCpu(TorchFunctionMode):
    """Function mode that creates CPU tensors for CUDA devices, and reports CUDA names for tensor types."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function with its CUDA device replaced by the CPU."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


@contextmanager
def stand_in_for_cuda(device_type: str) -> Iterator[None]:
    """Let megatron-core run on the CPU inside the block. Does nothing for other device types."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Without TransformerEngine, 0.16.1 reads this name but never sets it: a NameError in the router,
    # forward and backward. It stays set, because backward passes on one device run outside this block.
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
    """Return all-to-all sizes as numpy if Megatron asks for it: its own function does so only on CUDA."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
