"""Recomputation adds a pass's values to a log a second time."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Accumulate the router's counts over forward passes until they are read, like a log."""
    from torch import Tensor

    from moeverify.cases.schema import Recipe
    from moeverify.model.router import Router, Routing
    from moeverify.parallel.regions.observer import Observer
    from moeverify.train.data import Batch
    from moeverify.train.program import Program, Source
    from moeverify.train.routing import observe_routing

    @patch.wrap(Router.forward)
    def add_to_log(
        original: Original[Routing], self: Router, x: Tensor, valid: Tensor | None = None
    ) -> Routing:
        logged = self.record
        routing = original(self, x, valid)
        if logged is not None and self.record is not None:
            self.record = self.record._replace(counts=logged.counts + self.record.counts)
        return routing

    @patch.wrap(observe_routing)
    def read_and_clear(
        original: Original[list[Tensor]],
        recipe: Recipe,
        program: Program,
        batch: Batch,
        observer: Observer,
        step: int,
        replayed: Source | None,
    ) -> list[Tensor]:
        counts = original(recipe, program, batch, observer, step, replayed)
        for router in program.routers:
            router.module.record = None
        return counts


FAULT = Fault(
    number="C21",
    title="router log counts twice under recomputation",
    source="NVIDIA/Megatron-LM e6d56d6828, PR #1585",
    mechanism="the forward pass adds to a log, and recomputation runs it once more",
    trigger="activation recomputation",
    case=make_case("c21", dp_shard=2, recompute=True),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.METRIC, Cause.SCALE)),
    inject=inject,
    notes="upstream it is the log of the auxiliary loss; what a router logs in its forward pass here is its counts",
)
