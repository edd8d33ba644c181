"""A parameter replicated over ep is drawn under the seed of the experts, which differs per rank."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Add the rank, which in this case is the ep rank, to the seed of the shared expert."""
    import torch
    import torch.distributed as dist

    from moeverify.cases.schema import ReferenceModel
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def seed_by_rank(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        offset = dist.get_rank() if ".moe.shared." in shard.name else 0
        original(spec, seed + offset, shard, dtype)


FAULT = Fault(
    number="F03",
    title="a replicated parameter of the experts starts differently on each ep rank",
    source="NVIDIA-NeMo/Megatron-Bridge PR #5396",
    mechanism="a parameter of all experts is drawn under the ep rank's seed; averaged gradients keep the offset",
    trigger="expert parallelism with parameters that all experts share",
    case=make_case("f03", dp_replicate=2, data_parallel="ddp", ep=2),
    expected=Expected(where=(At(name="*.moe.shared.*"),), causes=(Cause.REPLICAS,)),
    inject=inject,
    notes="upstream's parameter was a LoRA adapter shared by the experts; here it is the shared expert",
)
