"""What a forward pass adds to a log is added again when the pass is recomputed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moeverify.diagnose.cause import Cause
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.router import Router, Routing
from moeverify.train import loop


def inject() -> None:
    """Let every forward pass add to the router's counts until they are read, as a log does."""

    def forward(self: Router, x: Tensor, valid: Tensor | None = None) -> Routing:
        logged = self.record
        routing = original(self, x, valid)
        assert self.record is not None
        if logged is not None:
            self.record = self.record._replace(counts=logged.counts + self.record.counts)
        return routing

    def observe_routing(recipe: Any, program: Any, *rest: Any) -> list[Tensor]:
        counts = read(recipe, program, *rest)
        for router in program.routers:
            router.module.record = None
        return counts

    original, read = Router.forward, loop.observe_routing
    Router.forward = forward  # type: ignore[method-assign]
    loop.observe_routing = observe_routing


FAULT = Fault(
    number="C21",
    title="router log counts twice under recomputation",
    source="NVIDIA/Megatron-LM e6d56d6828, PR #1585",
    mechanism="the forward pass adds to a log, and recomputation runs it once more",
    trigger="activation recomputation",
    case=make_case("c21", dp_shard=2, recompute=True),
    expected=Expected(where=r"router", causes=(Cause.METRIC,)),
    inject=inject,
    notes="upstream it is the log of the auxiliary loss; what a router logs in its forward pass here is its counts",
)
