"""DDP's sync flag is set after the forward pass, which has already prepared the reduction or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Set the flag between forward and backward instead of around both."""
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

    from moeverify.parallel.ddp import Accumulate, apply_ddp

    @patch.wrap(apply_ddp)
    def set_flag_late(
        original: Original[tuple[nn.Module, Accumulate]],
        model: nn.Module,
        group: ProcessGroup,
        device: torch.device,
        **options: Any,
    ) -> tuple[nn.Module, Accumulate]:
        wrapped, _ = original(model, group, device, **options)
        wanted = [True]

        def toggle(module: Any, inputs: Any, output: Any) -> None:
            module.require_backward_grad_sync = wanted[0]

        @contextmanager
        def accumulate(last: bool) -> Iterator[None]:
            wanted[0] = last
            yield

        wrapped.register_forward_hook(toggle)
        return wrapped, accumulate


FAULT = Fault(
    number="G15",
    title="the last micro-batch is not reduced by DDP",
    source="karpathy/build-nanogpt PR #30",
    mechanism="the forward pass arms the reduction by the flag of the micro-batch before; the backward does not look",
    trigger="DDP with gradient accumulation",
    case=make_case("g15", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp", micro_batches=2),
    expected=Expected(
        where=(At(axis="dp_replicate"), At(share="micro_batch")), causes=(Cause.MISSING_REDUCTION,)
    ),
    inject=inject,
    is_moe=False,
)
