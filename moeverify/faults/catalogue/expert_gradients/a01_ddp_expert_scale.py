"""Expert gradients contain the tokens of all ep ranks and lack the division that DDP applies to others."""

from __future__ import annotations

from dataclasses import replace

from moeverify.faults.catalogue.expert_gradients.reductions import change_reductions
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Keep the gradients of experts as a sum over the ep ranks."""
    change_reductions(patch, lambda reduction, _: replace(reduction, divisor=1.0))


FAULT = Fault(
    number="A01",
    title="expert gradients are ep times too large beside DDP's averages",
    source="databricks/megablocks PR #20 (4b487d1), issue #86",
    mechanism="an ep rank sums the tokens of all ep ranks and no data-parallel average follows; 1/ep is missing",
    trigger="expert parallelism over data-parallel ranks",
    case=make_case("a01", dp_replicate=2, data_parallel="ddp", ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
)
