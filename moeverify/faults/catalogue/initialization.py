"""Initial values and random states: shards or replicas that differ from the values of one device.

Class F. Seeds that omit the rank for different shards, or include it for copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case, make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeverify.cases.schema import ReferenceModel
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.tools.checkpoint.writer import HeldBox


def fill_run(spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype, start: int = 0) -> None:
    """Fill a shard of n elements with elements `start` to `start + n` of the whole tensor's stream.

    The right code takes each element from its position in the whole tensor.
    """
    import torch

    from moeverify.model.init import initial_values

    local = shard.local()
    index = torch.arange(start, start + local.numel(), device=local.device)
    values = initial_values(spec, seed, shard.name, shard.region.shape, index)
    local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))


@fault(
    "F01",
    title="experts on different ranks start as copies",
    source="laekov/fastmoe PR #4",
    mechanism="all workers draw their experts under the same seed, so rank r's experts equal rank 0's",
    trigger="expert parallelism",
    case=make_case("f01", dp_replicate=2, data_parallel="ddp", ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.DUPLICATE,),
)
def f01_experts_of_one_seed(patch: Patch) -> None:
    """Draw the local experts from the start of the seed's stream on every rank."""
    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def restart_experts(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        fill = fill_run if ".experts." in shard.name else original
        fill(spec, seed, shard, dtype)


@fault(
    "F03",
    title="a replicated parameter of the experts starts differently on each ep rank",
    source="NVIDIA-NeMo/Megatron-Bridge PR #5396",
    mechanism="a parameter of all experts is drawn under the ep rank's seed; averaged gradients keep the offset",
    trigger="expert parallelism with parameters that all experts share",
    case=make_case("f03", dp_replicate=2, data_parallel="ddp", ep=2),
    where=(At(name="*.moe.shared.*"),),
    causes=(Cause.REPLICAS,),
    notes="upstream's parameter was a LoRA adapter shared by the experts; here it is the shared expert",
)
def f03_replica_of_expert_seed(patch: Patch) -> None:
    """Add the rank, which in this case is the ep rank, to the seed of the shared expert."""
    import torch.distributed as dist

    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def seed_by_rank(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        offset = dist.get_rank() if ".moe.shared." in shard.name else 0
        original(spec, seed + offset, shard, dtype)


@fault(
    "F04",
    title="shards and layers of one shape start as copies",
    source="pytorch/torchtitan #3106",
    mechanism="random operations on a DTensor fork and restore the CPU's random state: all draw the same numbers",
    trigger="FSDP2 with parameters on the CPU",
    case=make_case("f04", preset="tiny-gpt", dp_shard=2),
    where=(At(stage=Stage.INITIALIZATION),),
    causes=(Cause.DUPLICATE,),
    is_moe=False,
    notes="every parameter is at fault, so every place is right",
)
def f04_reset_generator(patch: Patch) -> None:
    """Let every tensor and every shard draw from the start of one stream."""
    from moeverify.model.init import draw
    from moeverify.train.assemble import fill_one

    @patch.wrap(draw)
    def draw_without_name(original: Original[Tensor], seed: int, name: str, flat_index: Tensor) -> Tensor:
        return original(seed, "", flat_index)

    patch.replace(fill_one)(fill_run)


@fault(
    "F05",
    title="the shards of a parameter start as copies",
    source="allenai/OLMo-core PR #307, PR #679 (38704d167)",
    mechanism="the seed of a sharded parameter has no part of the rank in it",
    trigger="parameters sharded over tp or fsdp",
    case=make_case("f05", preset="tiny-gpt", tp=2),
    where=(At(name="embed*"), At(name="*_proj*"), At(name="lm_head*")),
    causes=(Cause.DUPLICATE,),
    is_moe=False,
)
def f05_shards_of_one_seed(patch: Patch) -> None:
    """Draw each shard from the start of its parameter's stream."""
    from torch.distributed.tensor import DTensor

    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def restart_shards(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        fill = fill_run if isinstance(shard.tensor, DTensor) else original
        fill(spec, seed, shard, dtype)


@fault(
    "F06",
    title="the stages of a pipeline start as copies",
    source="pytorch/pytorch issue #139304; pytorch/torchtitan issue #514, PR #689",
    mechanism="all stages draw their layers under one seed, so that a layer equals the one of its place in "
    "another stage",
    trigger="a pipeline",
    case=make_case("f06", preset="stress-tied", pp=2, micro_batches=2),
    where=(At(name="layers.1.*"),),
    causes=(Cause.DUPLICATE,),
    is_moe=False,
)
def f06_stages_of_one_seed(patch: Patch) -> None:
    """Fill the second stage's layer with the values of the first stage's layer."""
    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def fill_by_place(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        name = shard.name.replace("layers.1.", "layers.0.")
        original(spec, seed, replace(shard, name=name), dtype)


@fault(
    "F07",
    title="initial values depend on the dim that is sharded",
    source="pytorch/pytorch #168058",
    mechanism="DTensor offsets the random stream by whole shards, which is the single device's order for dim 0 only",
    trigger="initialization of tensors that are sharded on another dim than 0",
    case=make_case("f07", preset="tiny-gpt", tp=2),
    where=(At(name="*.o_proj*"), At(name="*.down_proj*")),
    causes=(Cause.PERMUTATION,),
    is_moe=False,
    notes="the values of the golden, in other places: a shard's rows are filled one after the other",
)
def f07_initialization_by_shard(patch: Patch) -> None:
    """Give shard r of n the r-th run of the parameter's stream, whatever dim is sharded."""
    from torch.distributed.tensor import DTensor

    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def fill_shard_after_shard(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        if not isinstance(shard.tensor, DTensor) or not shard.tensor.placements[0].is_shard():
            original(spec, seed, shard, dtype)
            return
        rank = shard.tensor.device_mesh.get_local_rank()
        fill_run(spec, seed, shard, dtype, start=rank * shard.local().numel())


@fault(
    "F09",
    title="every rank gets the random state of rank 0",
    source="NVIDIA-NeMo/Automodel PR #3437 (835c900ba)",
    mechanism="the file of the random states has a name without the rank",
    trigger="anything random: dropout, jitter",
    saver=make_saved_case("f09", dp_replicate=2, data_parallel="ddp"),
    case=make_saved_case("f09", dp_replicate=2, data_parallel="ddp"),
    where=(At(name="rng/*"),),
    causes=(Cause.DUPLICATE,),
    is_moe=False,
    notes="status of the report: title only",
)
def f09_generators_of_one_rank(patch: Patch) -> None:
    """Save the states of rank 0 for all ranks."""
    import torch.distributed as dist

    from moeverify.tools.checkpoint import save

    @patch.wrap(save.list_parts, used_by=save)
    def share_generators(
        original: Original[tuple[list[HeldBox], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[HeldBox], dict[str, Tensor]]:
        parts, state = original(tensors)
        for number, part in enumerate(parts):
            if part.key.startswith("rng/"):
                shared = state[str(number)].clone()
                dist.broadcast(shared, src=0)
                state[str(number)] = shared
        return parts, state
