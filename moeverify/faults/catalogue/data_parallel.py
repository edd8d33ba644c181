"""DDP and FSDP: gradients that are reduced over too few ranks, or with the wrong divisor.

Class I. A wrapper's reduction follows from its arguments: groups, hybrid meshes and ignored modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.cases.schema import Fsdp1Strategy, Layout
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate
    from moeverify.parallel.meshes import Meshes


@fault(
    "I01",
    title="FSDP1's hybrid does not reduce over replicas of one rank",
    source="pytorch/pytorch #154888; volcengine/verl #7493",
    mechanism="HYBRID_SHARD on a mesh of (n, 1) becomes NO_SHARD over the shard group, whose size is 1",
    trigger="FSDP1 with replicas and shard groups of one rank",
    case=make_case("i01", preset="tiny-gpt", dp_replicate=2, data_parallel="fsdp1"),
    where=(At(axis="dp_replicate"),),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
    notes="torch 2.13 still does it; the layout avoids it, and the fault takes that away",
)
def i01_hybrid_of_one_shard(patch: Patch) -> None:
    """Use a hybrid strategy on a mesh of (n, 1), over which torch reduces nothing."""
    from moeverify.parallel.fsdp1 import STRATEGIES, choose_ranks

    @patch.replace(choose_ranks)
    def choose_hybrid(mesh: DeviceMesh, strategy: Fsdp1Strategy) -> dict[str, Any]:
        return {"device_mesh": mesh, "sharding_strategy": STRATEGIES[strategy, mesh.ndim]}


@fault(
    "I02",
    title="DDP does not reduce over the ranks of a sequence",
    source="ByteDance-Seed/VeOmni #1059, PR #1115",
    mechanism="DDP's group is that of data parallelism alone; with one data rank its all-reduce does nothing",
    trigger="DDP with Ulysses or context parallelism",
    case=make_case("i02", preset="tiny-gpt", data_parallel="ddp", cp=2, context_parallel="alltoall"),
    where=(At(axis="cp"),),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
)
def i02_ddp_without_sequence_ranks(patch: Patch) -> None:
    """Give DDP the group of data replicas, without cp."""
    from moeverify.parallel.ddp import apply_ddp
    from moeverify.parallel.plan import apply_data_parallel

    groups: list[ProcessGroup] = []

    @patch.wrap(apply_data_parallel)
    def remember_group(
        original: Original[tuple[nn.Module, Accumulate]],
        model: Transformer,
        layout: Layout,
        meshes: Meshes,
        *args: Any,
        **named: Any,
    ) -> tuple[nn.Module, Accumulate]:
        groups[:] = [meshes.group("dp_replicate")]
        return original(model, layout, meshes, *args, **named)

    @patch.wrap(apply_ddp)
    def use_group(
        original: Original[tuple[nn.Module, Accumulate]],
        model: nn.Module,
        group: ProcessGroup,
        device: torch.device,
        **options: Any,
    ) -> tuple[nn.Module, Accumulate]:
        return original(model, groups[0], device, **options)


@fault(
    "I03",
    title="expert gradients are divided by the replicas twice",
    source="pytorch/pytorch issue #155903",
    mechanism="a divisor of one's own replaces that of the reduce-scatter only; the all-reduce over replicas "
    "still averages",
    trigger="hybrid shards with expert parallelism",
    case=make_case("i03", dp_replicate=2, dp_shard=2, ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
)
def i03_divided_again_by_replicas(patch: Patch) -> None:
    """Divide the gradients of experts by the number of replicas a second time."""
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.plan import expert_reductions

    @patch.wrap(expert_reductions)
    def average_again(
        original: Original[list[Reduction]], experts: Sequence[Tensor], layout: Layout, meshes: Meshes
    ) -> list[Reduction]:
        again = Reduction(experts, None, divisor=float(layout.dp_replicate))
        return [*original(experts, layout, meshes), again]


@fault(
    "I04",
    title="gradients of modules that FSDP ignores are not reduced",
    source="pytorch/pytorch #98281",
    mechanism="ignored parameters stay whole on each rank, and their gradients local unless the user sums them",
    trigger="FSDP1 with ignored modules, as experts and routers often are",
    case=make_case("i04", dp_shard=2, data_parallel="fsdp1"),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
)
def i04_ignored_router(patch: Patch) -> None:
    """Pass the routers' parameters as ignored states when a module is wrapped."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from moeverify.model.router import Router

    @patch.wrap(FullyShardedDataParallel.__init__)
    def ignore_routers(
        original: Original[None], self: FullyShardedDataParallel, module: nn.Module, *args: Any, **named: Any
    ) -> None:
        routers = [part for part in module.modules() if isinstance(part, Router)]
        ignored = [parameter for router in routers for parameter in router.parameters()]
        original(self, module, *args, **{**named, "ignored_states": ignored})


@fault(
    "I06",
    title="FSDP's gradients over gloo are the world's size too large",
    source="pytorch/pytorch #162338, PR #162344",
    mechanism="gloo's reduce_scatter takes AVG and does not divide",
    trigger="FSDP2 over gloo in a dtype that it averages inside the collective: float32 or bfloat16",
    case=make_case("i06", preset="tiny-gpt", recipe={"precision": "float32"}, dp_shard=2),
    where=(At(axis="dp_shard"), At(axis="fsdp")),
    causes=(Cause.SCALE,),
    precisions=("float32", "bfloat16", "mixed"),
    is_moe=False,
)
def i06_gloo_average_is_sum(patch: Patch) -> None:
    """Replace AVG by SUM in every reduce-scatter."""
    import torch.distributed as dist

    # Renamed in torch 2.13.
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    @patch.wrap(reduce_scatter, used_by=dist)
    def sum_always(original: Original[Any], *tensors: Any, op: Any = dist.ReduceOp.SUM, **named: Any) -> Any:
        return original(*tensors, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **named)
