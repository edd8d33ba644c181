"""Gradients of experts: another scale, or a reduction over other ranks, than dense gradients need.

Class A. An expert sees the tokens of all ep ranks, so its gradient is already a sum over them. It is
replicated on fewer ranks than a dense parameter. The divisors and groups of data parallelism are therefore
wrong for it. The loss of the first step is right, and AdamW hides a wrong scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moeverify.faults.catalogue.routing import leave_unreduced
from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from moeverify.cases.schema import Layout
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.clipping import SumOverShards


def change_reductions(patch: Patch, change: Callable[[Reduction, Meshes], Reduction]) -> None:
    """Replace each planned reduction of expert gradients by `change(reduction, meshes)`."""
    from moeverify.parallel.plan import expert_reductions

    @patch.wrap(expert_reductions)
    def changed(
        original: Original[list[Reduction]], experts: Sequence[Tensor], layout: Layout, meshes: Meshes
    ) -> list[Reduction]:
        return [change(reduction, meshes) for reduction in original(experts, layout, meshes)]


def divide_by(patch: Patch, choose: Callable[[nn.Module, DeviceMesh, int], int]) -> None:
    """Let FSDP2 divide expert gradients by `choose(block, mesh, num_loss_ranks)`.

    The right divisor is `num_loss_ranks`. `mesh` contains the ranks that share an expert's shards or
    copies.
    """
    from moeverify.parallel.fsdp2 import shard_experts

    @patch.wrap(shard_experts)
    def divided(
        original: Original[None],
        block: nn.Module,
        mesh: DeviceMesh,
        num_loss_ranks: int,
        policy: MixedPrecisionPolicy,
    ) -> None:
        original(block, mesh, choose(block, mesh, num_loss_ranks), policy)


@fault(
    "A01",
    title="expert gradients are ep times too large beside DDP's averages",
    source="databricks/megablocks PR #20 (4b487d1), issue #86",
    mechanism="an ep rank sums the tokens of all ep ranks and no data-parallel average follows; 1/ep is missing",
    trigger="expert parallelism over data-parallel ranks",
    case=make_case("a01", dp_replicate=2, data_parallel="ddp", ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
)
def a01_ddp_expert_scale(patch: Patch) -> None:
    """Keep the gradients of experts as a sum over the ep ranks."""
    change_reductions(patch, lambda reduction, _: replace(reduction, divisor=1.0))


@fault(
    "A03",
    title="expert gradients ep times too large, and a norm averaged over ranks instead of added",
    source="deepspeedai/DeepSpeed PR #5259",
    mechanism="1/ep is missing, and the squared norm is averaged over all data ranks, experts included",
    trigger="expert parallelism over data-parallel ranks, with a clip",
    case=make_case("a03", dp_replicate=2, data_parallel="ddp", ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
    notes="two mistakes of one pull request; the gradients come first, and explain only a part of the norm's error",
)
def a03_expert_scale_and_norm(patch: Patch) -> None:
    """Omit 1/ep, and compute the norm as if all data-parallel ranks had the same experts."""
    import torch
    import torch.distributed as dist

    from moeverify.train.clipping import gradient_norm

    change_reductions(patch, lambda reduction, _: replace(reduction, divisor=1.0))

    @patch.replace(gradient_norm)
    def average_norm(
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        gradients = [shard.local(shard.tensor.grad) for shard in shards if shard.tensor.grad is not None]
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(total)
        return (total / dist.get_world_size()).sqrt()


@fault(
    "A04",
    title="expert gradients are divided twice",
    source="deepspeedai/DeepSpeed PR #4957",
    mechanism="divided once by hand and once by the all-reduce: 1/edp too small",
    trigger="sharded data parallelism with expert parallelism and several ranks an expert",
    case=make_case("a04", dp_shard=4, ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
)
def a04_expert_divided_twice(patch: Patch) -> None:
    """Divide expert gradients by the expert-data-parallel ranks, in addition to the right divisor."""
    divide_by(patch, lambda block, mesh, num_loss_ranks: num_loss_ranks * mesh.size())


@fault(
    "A05",
    title="expert gradients are ep times too large under FSDP2",
    source="pytorch/pytorch #160285; pytorch/torchtitan PR #1551 (59e57a4bb)",
    mechanism="fully_shard on the experts averages over the small expert mesh instead of all data ranks",
    trigger="FSDP2 with expert parallelism",
    case=make_case("a05", dp_shard=4, ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
)
def a05_fsdp2_expert_divisor(patch: Patch) -> None:
    """Shard experts without a custom divisor."""
    divide_by(patch, lambda block, mesh, num_loss_ranks: mesh.size())


@fault(
    "A07",
    title="expert gradients are averaged over the expert-data-parallel ranks only",
    source="NVIDIA/Megatron-LM PR #5956, issue #5656",
    mechanism="the reduce-scatter is an AVG over the expert mesh, without a divisor for ep: ep times too large",
    trigger="fully sharded data parallelism with expert parallelism, here with ep borrowed from cp",
    case=make_case("a07", dp_shard=2, cp=2, ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
    notes="first blamed on NCCL's rounding, with the proposal to widen the tolerance",
)
def a07_average_over_expert_ranks(patch: Patch) -> None:
    """Shard experts with the default average of the reduce-scatter over its own ranks."""
    from torch.distributed.fsdp import fully_shard

    from moeverify.model.experts import Experts
    from moeverify.parallel.fsdp2 import shard_experts

    @patch.replace(shard_experts)
    def average(
        block: nn.Module, mesh: DeviceMesh, num_loss_ranks: int, policy: MixedPrecisionPolicy
    ) -> None:
        for module in block.modules():
            if isinstance(module, Experts):
                fully_shard(module, mesh=mesh, mp_policy=policy)


@fault(
    "A08",
    title="expert gradients are scaled by 1/ep where the tp of experts is not the tp of the model",
    source="NVIDIA/Megatron-LM !2564 (4f8974a400)",
    mechanism="an average over edp and then 1/ep; right is edp/dp, which differs by etp/tp",
    trigger="sharded data parallelism with tp, ep and etp unlike tp",
    case=make_case("a08", dp_shard=2, tp=2, ep=2, etp=1),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
)
def a08_expert_scale_of_ep(patch: Patch) -> None:
    """Divide expert gradients by edp * ep instead of the data-parallel ranks."""
    from torch.distributed.tensor import DTensor

    from moeverify.model.experts import Experts

    def count_ranks(block: nn.Module, mesh: DeviceMesh, num_loss_ranks: int) -> int:
        weights = [module.gate for module in block.modules() if isinstance(module, Experts)]
        sharded = [weight for weight in weights if isinstance(weight, DTensor)]
        return mesh.size() * sharded[0].device_mesh["ep"].size() if sharded else num_loss_ranks

    divide_by(patch, count_ranks)


@fault(
    "A10",
    title="expert gradients are reduced like dense ones where etp is not tp",
    source="NVIDIA/Megatron-LM #1628, PR #1622, PR #5916",
    mechanism="experts with ep 1 and etp unequal to tp are taken for dense weights, whose group leaves tp out",
    trigger="etp 1 with tp above 1 and ep 1",
    case=make_case("a10", tp=2, etp=1),
    where=(At(name="*.moe.experts*", axis="tp"),),
    causes=(Cause.MISSING_REDUCTION,),
)
def a10_expert_copies_over_tp(patch: Patch) -> None:
    """Remove the experts from the parameters that are summed over tp."""
    from moeverify.model.experts import Experts

    leave_unreduced(patch, lambda module: list(module.parameters()) if isinstance(module, Experts) else [])


@fault(
    "A13",
    title="HSDP replicas of a MoE model never reduce their gradients",
    source="NVIDIA-NeMo/Automodel PR #3135",
    mechanism="the MoE parallelizer builds its mesh without dp_replicate: each replica trains on its own rows",
    trigger="HSDP with expert parallelism",
    case=make_case("a13", dp_replicate=2, dp_shard=2, ep=2),
    where=(At(axis="dp_replicate"),),
    causes=(Cause.MISSING_REDUCTION,),
)
def a13_no_replica_reduction(patch: Patch) -> None:
    """Give FSDP2 only the shard mesh, for dense parameters and for experts."""
    from moeverify.parallel.plan import shard_mesh

    patch.replace(shard_mesh)(lambda mesh, axis: mesh[axis])


@fault(
    "A14",
    title="the scaling of expert gradients for ep is never called",
    source="huggingface/nanotron 2dd40d35",
    mechanism="gradients are averaged over the copies of an expert only, since scale_gradients() was commented out",
    trigger="expert parallelism with several copies of each expert",
    case=make_case("a14", dp_replicate=4, data_parallel="ddp", ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
)
def a14_unscaled_expert_average(patch: Patch) -> None:
    """Divide expert gradients by the number of copies alone."""
    change_reductions(patch, lambda reduction, meshes: replace(reduction, divisor=float(meshes.size("edp"))))


@fault(
    "A15",
    title="experts without tokens have no gradient, so their optimizer state stands still",
    source="NVIDIA-NeMo/Automodel PR #2995 (item 3)",
    mechanism="where a rank gets no tokens its dummy branch touches one weight alone; the others keep no "
    "gradient, and AdamW neither decays nor steps them",
    trigger="expert parallelism, a rank whose experts get no token",
    case=make_case(
        "a15",
        dp_replicate=2,
        data_parallel="ddp",
        ep=2,
        optimizer="adamw",
        moe={"idle_experts": 8, "num_groups": 1, "top_groups": 1},
    ),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.STALE, Cause.DETACHED),
)
def a15_no_gradient_of_idle_experts(patch: Patch) -> None:
    """Drop the gradients of experts if all of them on this rank are zero."""
    import torch
    from torch.distributed.tensor import DTensor

    from moeverify.parallel.gradients import finalize_gradients

    @patch.wrap(finalize_gradients)
    def drop_idle(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        original(parameters, reductions)
        sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        gradients = [parameter.grad for parameter in sharded if isinstance(parameter.grad, DTensor)]
        if not any(bool(torch.any(gradient.to_local() != 0)) for gradient in gradients):
            for parameter in sharded:
                parameter.grad = None


@fault(
    "A16",
    title="copies of an expert never reduce their gradients",
    source="facebookresearch/fairseq issue #4220",
    mechanism="the data-parallel wrapper skips expert parameters, as if every expert lived on one rank only",
    trigger="expert parallelism on more ranks than ep, so that experts have copies",
    case=make_case("a16", dp_replicate=4, data_parallel="ddp", ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.MISSING_REDUCTION,),
    notes="an open question upstream, never confirmed by the maintainers",
)
def a16_unreduced_expert_copies(patch: Patch) -> None:
    """Scale expert gradients without summing them over the copies."""
    change_reductions(patch, lambda reduction, _: replace(reduction, group=None))
