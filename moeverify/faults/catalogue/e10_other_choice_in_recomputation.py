"""The recomputed router chooses other experts than the forward pass did."""

from __future__ import annotations

import torch
from torch import Tensor

from moeverify.diagnose.cause import Cause
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model import router


def inject() -> None:
    """Choose from slightly other scores while a backward pass runs, as a top-k that is not deterministic may."""

    def take_best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        in_backward = torch._C._current_graph_task_id() != -1
        noise = 1e-3 * torch.sin(1e6 * scores) if in_backward else 0.0
        return original(scores + noise, count)

    original = router.take_best
    router.take_best = take_best


FAULT = Fault(
    number="E10",
    title="recomputation routes otherwise than the forward pass",
    source="pytorch/torchtitan PR #3146 (7074b056a)",
    mechanism="top-k is computed again under recomputation by an operation that is not deterministic",
    trigger="activation recomputation",
    case=make_case("e10", dp_shard=2, recompute=True, experts="grouped_mm", recipe={"precision": "float32"}),
    expected=Expected(where=r"moe\.router", causes=(Cause.ROUTING,)),
    inject=inject,
    notes="the golden's ids are replayed at this precision, so the choice shows and the gradient stays right",
)
