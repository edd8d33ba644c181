"""The gradient norm and the clip by it: shards missed, copies counted twice, a clip that does not act.

Class H. Gradients are right. The norm is a sum over ranks that must count each element of each parameter
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.cases.schema import Recipe
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.parallel.regions.observer import Observer
    from moeverify.train.clipping import SumOverShards
    from moeverify.train.program import TrainingProgram


def change_gradients(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Compute the norm of `change(gradient)` for each gradient; the gradients themselves stay unchanged."""
    from moeverify.train.clipping import norm_of_one_mesh

    @patch.wrap(norm_of_one_mesh)
    def measure_changed(
        original: Original[Tensor], gradients: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor:
        return original([change(gradient) for gradient in gradients], dtype)


def expert_mesh(gradient: Tensor) -> DeviceMesh | None:
    """Return the mesh over which a gradient is sharded if it has an ep axis, else None."""
    from torch.distributed.tensor import DTensor

    if not isinstance(gradient, DTensor):
        return None
    mesh = gradient.device_mesh
    return mesh if "ep" in (mesh.mesh_dim_names or ()) else None


def sum_squares_over_world(patch: Patch, applies: Callable[[Sequence[LocalShard], bool], bool]) -> None:
    """Sum the squares of plain-tensor gradients over all ranks, where `applies` is true.

    `applies` gets the shards, and whether their squares are summed over some ranks already.
    """
    from functools import partial

    import torch.distributed as dist

    from moeverify.parallel.collectives import sum_over
    from moeverify.train.clipping import gradient_norm

    @patch.wrap(gradient_norm)
    def sum_over_world(
        original: Original[Tensor],
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        if applies(shards, sum_over_shards is not None):
            assert dist.group.WORLD is not None
            sum_over_shards = partial(sum_over, group=dist.group.WORLD)
        return original(shards, sum_over_shards, sum_over_stages)


@fault(
    "H01",
    title="the gradient norm misses the experts of all but one tp rank",
    source="NVIDIA/Megatron-LM PR #5916; radixark/Megatron-LM PR #80",
    mechanism="the rule that a dense parameter is counted by tp rank 0 is applied to experts, which differ",
    trigger="tp with expert parallelism and etp 1",
    case=make_case("h01", tp=2, ep=2),
    where=(At(stage=Stage.GRADIENT_NORM),),
    causes=(Cause.NORM,),
)
def h01_norm_of_owned_experts(patch: Patch) -> None:
    """Omit the experts on tp ranks above 0, which in this case are the ep ranks."""

    def disown(gradient: Tensor) -> Tensor:
        mesh = expert_mesh(gradient)
        return gradient * 0 if mesh is not None and mesh.get_local_rank("ep") > 0 else gradient

    change_gradients(patch, disown)


TP = 2


def count_on_each_rank(patch: Patch, is_counted: Callable[[LocalShard], bool]) -> None:
    """Count the squares of some gradients in the norm once per tp rank."""
    from moeverify.train.clipping import gradient_norm

    @patch.wrap(gradient_norm)
    def count_again(
        original: Original[Tensor],
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        counted = [shard for shard in shards if is_counted(shard)]
        norm = original(shards, sum_over_shards, sum_over_stages)
        again = original(counted, sum_over_shards, sum_over_stages)
        return (norm.square() + (TP - 1) * again.square()).sqrt()


@fault(
    "H02",
    title="the gradient norm counts parameters that are replicated over tp once a rank",
    source="NVIDIA-NeMo/RL PR #3788",
    mechanism="the squares of all gradients are summed over tp",
    trigger="tp beside shards of data parallelism",
    case=make_case("h02", preset="tiny-gpt", dp_shard=2, tp=TP),
    where=(At(stage=Stage.GRADIENT_NORM, axis="tp"),),
    causes=(Cause.NORM,),
    is_moe=False,
)
def h02_replicas_over_tp(patch: Patch) -> None:
    """Count the squares of parameters not sharded over tp once per tp rank."""
    count_on_each_rank(patch, lambda shard: not is_sharded(shard.tensor))


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is sharded over tp."""
    mesh = getattr(tensor, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    placements = getattr(tensor, "placements", ())
    return any(name == "tp" and place.is_shard() for name, place in zip(names, placements, strict=True))


@fault(
    "H03",
    title="each rank clips by the norm of its own shard",
    source="RLinf/RLinf PR #1558",
    mechanism="the mesh axis is looked up under a name that it does not have, so the norm is never reduced",
    trigger="FSDP",
    case=make_case("h03", preset="tiny-gpt", dp_shard=2),
    where=(At(stage=Stage.GRADIENT_NORM),),
    causes=(Cause.NORM,),
    is_moe=False,
)
def h03_norm_of_local_shard(patch: Patch) -> None:
    """Compute the norm of local shards without a reduction."""
    from moeverify.parallel.regions.placement import local_part

    change_gradients(patch, local_part)


@fault(
    "H04",
    title="the gradient norm of FSDP1 without sharding counts every copy",
    source="pytorch/pytorch PR #88955",
    mechanism="clip_grad_norm_ sums the squares over the process group whether or not its ranks hold shards: sqrt(n)",
    trigger="FSDP1 with NO_SHARD",
    case=make_case("h04", preset="tiny-gpt", dp_replicate=2, data_parallel="fsdp1"),
    where=(At(stage=Stage.GRADIENT_NORM),),
    causes=(Cause.NORM,),
    is_moe=False,
)
def h04_norm_of_every_copy(patch: Patch) -> None:
    """Sum squares over all ranks of FSDP, which in this case hold copies and no shards."""
    sum_squares_over_world(patch, lambda shards, is_flat: is_flat)


@fault(
    "H05",
    title="the gradient norm of HSDP counts every replica",
    source="ByteDance-Seed/VeOmni #184",
    mechanism="squares are summed over replicas and shards instead of the shards alone: sqrt(replicas)",
    trigger="HSDP",
    case=make_case("h05", preset="tiny-gpt", dp_replicate=2, dp_shard=2),
    where=(At(stage=Stage.GRADIENT_NORM),),
    causes=(Cause.NORM,),
    is_moe=False,
)
def h05_norm_over_replicas(patch: Patch) -> None:
    """Sum the squares over all data ranks (here all ranks) instead of over one replica."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from moeverify.parallel.collectives import sum_over
    from moeverify.parallel.regions.placement import local_part
    from moeverify.train.clipping import norm_of_one_mesh

    @patch.wrap(norm_of_one_mesh)
    def sum_over_all(original: Original[Tensor], gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        norm = original([local_part(gradient) for gradient in gradients], dtype)
        if not any(isinstance(gradient, DTensor) for gradient in gradients):
            return norm
        assert dist.group.WORLD is not None
        return sum_over(norm.square(), dist.group.WORLD).sqrt()


@fault(
    "H06",
    title="the gradient norm of each stage is its own",
    source="pytorch/torchtitan issue #596, PR #649",
    mechanism="the norm is not reduced over the stages",
    trigger="a pipeline",
    case=make_case("h06", preset="tiny-gpt", pp=2, micro_batches=2, stage_layers=(2, 1)),
    where=(At(stage=Stage.GRADIENT_NORM, axis="pp"),),
    causes=(Cause.NORM,),
    is_moe=False,
)
def h06_norm_of_each_stage(patch: Patch) -> None:
    """Omit the sum over the stages."""
    from moeverify.train.clipping import gradient_norm

    @patch.wrap(gradient_norm)
    def measure_stage(
        original: Original[Tensor],
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        del sum_over_stages
        return original(shards, sum_over_shards, None)


@fault(
    "H07",
    title="the gradient norm misses the experts of other ranks",
    source="foundation-model-stack/fms-acceleration #109, PR #157",
    mechanism="FSDP's clip knows its own shards only; expert DTensors count as they are on each rank",
    trigger="FSDP with expert parallelism",
    case=make_case("h07", dp_shard=2, ep=2),
    where=(At(stage=Stage.GRADIENT_NORM),),
    causes=(Cause.NORM,),
)
def h07_norm_of_local_experts(patch: Patch) -> None:
    """Compute the norm of experts from local shards without a reduction."""
    from moeverify.parallel.regions.placement import local_part

    change_gradients(
        patch, lambda gradient: gradient if expert_mesh(gradient) is None else local_part(gradient)
    )


@fault(
    "H08",
    title="the guard of the clip's division is added once a rank",
    source="pytorch/pytorch issues #149768, #163193",
    mechanism="DTensor adds a Python number to the local part of a partial sum on every rank",
    trigger="a clip of DTensors",
    case=make_case("h08", preset="tiny-gpt", dp_shard=2),
    where=(At(stage=Stage.GRADIENT_NORM), At(stage=Stage.CLIP)),
    causes=(Cause.NORM,),
    is_moe=False,
)
def h08_scalar_on_partial_norm(patch: Patch) -> None:
    """Add the small constant that guards the division once per rank."""
    import torch.distributed as dist

    from moeverify.train.clipping import clip_gradients

    @patch.wrap(clip_gradients)
    def add_on_every_rank(
        original: Original[Tensor], shards: Sequence[LocalShard], norm: Tensor, max_norm: float
    ) -> Tensor:
        return original(shards, norm + (dist.get_world_size() - 1) * 1e-6, max_norm)


@fault(
    "H09",
    title="the norm of partial gradients is the sum of the norms on each rank",
    source="pytorch/pytorch PR #159856",
    mechanism="the norm of a DTensor placed Partial is computed on each rank's partial sum and then reduced",
    trigger="tp with gradients that are still partial sums",
    case=make_case("h09", preset="tiny-gpt", model={"qk_norm": True}, tp=2),
    where=(At(stage=Stage.GRADIENT_NORM),),
    causes=(Cause.NORM,),
    is_moe=False,
)
def h09_norm_of_partial_gradients(patch: Patch) -> None:
    """Record the norms of partial sums before the reduction, and use them instead of the sums' norms."""
    import torch

    from moeverify.parallel.collectives import sum_over
    from moeverify.parallel.gradients import finalize_gradients
    from moeverify.parallel.regions.placement import local_part
    from moeverify.train.clipping import gradient_norm

    norms: dict[int, Tensor] = {}

    @patch.wrap(finalize_gradients)
    def remember_norms(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        for reduction in reductions:
            for parameter in reduction.parameters:
                if parameter.grad is not None and reduction.group is not None:
                    norms[id(parameter)] = sum_over(local_part(parameter.grad).norm(), reduction.group)
        original(parameters, reductions)

    @patch.wrap(gradient_norm)
    def add_norms(
        original: Original[Tensor],
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        whole = [shard for shard in shards if id(shard.tensor) not in norms]
        partial = [norms.pop(id(shard.tensor)) for shard in shards if id(shard.tensor) in norms]
        rest = original(whole, sum_over_shards, sum_over_stages)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([rest, *partial]))
        return norm


@fault(
    "H10",
    title="gradients are never clipped",
    source="pytorch/torchtitan PR #1258 (775a486ed)",
    mechanism="model.parameters() is a generator, exhausted by the norm when the gradients are to be scaled",
    trigger="any",
    case=make_case("h10", preset="tiny-gpt", dp_shard=2),
    where=(At(stage=Stage.CLIP), At(stage=Stage.GRADIENT_NORM)),
    causes=(Cause.NORM,),
    is_moe=False,
    notes="norm and coefficient are reported right; the coefficient is not applied",
)
def h10_exhausted_parameters(patch: Patch) -> None:
    """Share one iterator over the parameters between norm and clip."""
    from moeverify.train.loop import clip

    @patch.wrap(clip)
    def clip_exhausted(
        original: Original[None], recipe: Recipe, program: TrainingProgram, observer: Observer, step: int
    ) -> None:
        once: Any = iter(program.shards)
        original(recipe, replace(program, shards=once, counted=once), observer, step)


@fault(
    "H11",
    title="the gradient norm counts a replicated parameter once a rank",
    source="mindspore-ai/hyper-parallel #526",
    mechanism="norms of parameters that are not sharded go into the sum over the shard group like those of shards",
    trigger="shards beside replicated parameters",
    case=make_case("h11", preset="tiny-gpt", tp=2),
    where=(At(stage=Stage.GRADIENT_NORM),),
    causes=(Cause.NORM,),
    is_moe=False,
    notes="upstream's shards were FSDP's; here they are those of tp, beside which the norms are replicated",
)
def h11_replicated_parameters_counted_often(patch: Patch) -> None:
    """Sum the squares of plain gradients over the ranks of the shards, which here are all ranks."""
    from torch.distributed.tensor import DTensor

    sum_squares_over_world(
        patch, lambda shards, is_flat: any(isinstance(shard.tensor, DTensor) for shard in shards)
    )


@fault(
    "H12",
    title="the gradient norm counts one parameter of attention once a rank",
    source="NVIDIA/Megatron-LM issue #7452, item 8",
    mechanism="the attribute that says that a parameter is replicated over tp is wrong",
    trigger="tp",
    case=make_case("h12", tp=TP),
    where=(At(stage=Stage.GRADIENT_NORM, axis="tp"), At(name="*q_norm*")),
    causes=(Cause.NORM,),
    is_moe=False,
    notes="upstream's parameter is the attention sink, which the reference model lacks",
)
def h12_one_parameter_on_each_rank(patch: Patch) -> None:
    """Count the squares of the query norms once per tp rank."""
    count_on_each_rank(patch, lambda shard: shard.name.endswith("attention.q_norm.weight"))
