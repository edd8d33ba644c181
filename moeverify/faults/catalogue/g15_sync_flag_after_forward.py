"""DDP is told whether to reduce only after the forward pass, which has already armed the reduction or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import ddp
from moeverify.parallel.ddp import Accumulate
from moeverify.results.cause import Cause


def inject() -> None:
    """Set the flag between forward and backward instead of around both."""

    def apply_ddp(
        model: nn.Module, group: ProcessGroup, device: torch.device
    ) -> tuple[nn.Module, Accumulate]:
        wrapped, _ = original(model, group, device)
        wanted = [True]

        def toggle(module: nn.Module, inputs: Any, output: Any) -> None:
            module.require_backward_grad_sync = wanted[0]

        @contextmanager
        def micro_batch(last: bool) -> Iterator[None]:
            wanted[0] = last
            yield

        def accumulate(last: bool) -> AbstractContextManager[None]:
            return micro_batch(last)

        wrapped.register_forward_hook(toggle)
        return wrapped, accumulate

    original = ddp.apply_ddp
    ddp.apply_ddp = apply_ddp


FAULT = Fault(
    number="G15",
    title="the last micro-batch is not reduced by DDP",
    source="karpathy/build-nanogpt PR #30",
    mechanism="the forward pass arms the reduction by the flag of the micro-batch before; the backward does not look",
    trigger="DDP with gradient accumulation",
    case=make_case("g15", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp", micro_batches=2),
    expected=Expected(where=r"axis .*dp_replicate|micro-batch", causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    is_moe=False,
)
