"""A shard draws a contiguous run of the stream, so the values depend on the sharded dim."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Give shard r of n the r-th run of the parameter's stream, whatever dim is sharded."""
    import torch
    from torch.distributed.tensor import DTensor

    from moeverify.cases.schema import ReferenceModel
    from moeverify.faults.catalogue.initialization.streams import fill_run
    from moeverify.parallel.regions.local_shard import LocalShard
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


FAULT = Fault(
    number="F07",
    title="initial values depend on the dim that is sharded",
    source="pytorch/pytorch #168058",
    mechanism="DTensor offsets the random stream by whole shards, which is the single device's order for dim 0 only",
    trigger="initialization of tensors that are sharded on another dim than 0",
    case=make_case("f07", preset="tiny-gpt", tp=2),
    expected=Expected(where=(At(name="*.o_proj*"), At(name="*.down_proj*")), causes=(Cause.PERMUTATION,)),
    inject=inject,
    is_moe=False,
    notes="the values of the golden, in other places: a shard's rows are filled one after the other",
)
