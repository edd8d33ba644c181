"""Every rank fills its experts from the same seed, so the experts of all ep ranks begin as copies."""

from __future__ import annotations

import torch

from moeverify.case.schema import ReferenceModel
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.layout.local_shard import LocalShard
from moeverify.model.init import initial_values
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train import assemble


def inject() -> None:
    """Draw what a rank holds of the experts from the start of the seed's stream, on every rank."""

    def fill_one(spec: ReferenceModel, seed: int, held: LocalShard, dtype: torch.dtype) -> None:
        if ".experts." not in held.name:
            original(spec, seed, held, dtype)
            return
        local = held.local()
        index = torch.arange(local.numel(), device=local.device)
        values = initial_values(spec, seed, held.name, held.region.shape, index)
        local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))

    original = assemble.fill_one
    assemble.fill_one = fill_one


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
