"""The experts' custom divisor applies to the reduce-scatter, but the all-reduce averages again."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide the gradients of experts by the number of replicas a second time."""
    from torch import Tensor

    from moeverify.cases.schema import Layout
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.plan import expert_reductions

    @patch.wrap(expert_reductions)
    def average_again(
        original: Original[list[Reduction]], experts: Sequence[Tensor], layout: Layout, meshes: Meshes
    ) -> list[Reduction]:
        again = Reduction(experts, None, divisor=float(layout.dp_replicate))
        return [*original(experts, layout, meshes), again]


FAULT = Fault(
    number="I03",
    title="expert gradients are divided by the replicas twice",
    source="pytorch/pytorch issue #155903",
    mechanism=(
        "a divisor of one's own replaces that of the reduce-scatter only; the all-reduce over replicas "
        "still averages"
    ),
    trigger="hybrid shards with expert parallelism",
    case=make_case("i03", dp_replicate=2, dp_shard=2, ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
)
