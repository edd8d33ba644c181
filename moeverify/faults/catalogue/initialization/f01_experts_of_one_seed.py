"""Every rank fills its experts from the same seed, so the experts of all ep ranks start as copies."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Draw the local experts from the start of the seed's stream on every rank."""
    import torch

    from moeverify.cases.schema import ReferenceModel
    from moeverify.faults.catalogue.initialization.streams import fill_run
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def restart_experts(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        fill = fill_run if ".experts." in shard.name else original
        fill(spec, seed, shard, dtype)


FAULT = Fault(
    number="F01",
    title="experts on different ranks start as copies",
    source="laekov/fastmoe PR #4",
    mechanism="all workers draw their experts under the same seed, so rank r's experts equal rank 0's",
    trigger="expert parallelism",
    case=make_case("f01", dp_replicate=2, data_parallel="ddp", ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.DUPLICATE,)),
    inject=inject,
)
