"""DDP leaves expert parameters out, also where several ranks hold copies of the same expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from moeverify.case.schema import Layout
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import plan
from moeverify.parallel.gradients import Reduction
from moeverify.parallel.meshes import Meshes
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Scale expert gradients and do not sum them over the copies."""

    def reduce_experts(experts: Sequence[Tensor], layout: Layout, meshes: Meshes) -> list[Reduction]:
        return [replace(reduction, group=None) for reduction in original(experts, layout, meshes)]

    original = plan._expert_reductions
    plan._expert_reductions = reduce_experts


FAULT = Fault(
    number="A16",
    title="copies of an expert never reduce their gradients",
    source="facebookresearch/fairseq issue #4220",
    mechanism="the data-parallel wrapper skips expert parameters, as if every expert lived on one rank only",
    trigger="expert parallelism on more ranks than ep, so that experts have copies",
    case=make_case("a16", dp_replicate=4, data_parallel="ddp", ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    notes="an open question upstream, never confirmed by the maintainers",
)
