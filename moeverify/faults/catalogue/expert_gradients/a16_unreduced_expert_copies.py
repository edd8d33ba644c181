"""DDP skips expert parameters, even if several ranks hold copies of the same expert."""

from __future__ import annotations

from dataclasses import replace

from moeverify.faults.catalogue.expert_gradients.reductions import change_reductions
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Scale expert gradients without summing them over the copies."""
    change_reductions(patch, lambda reduction, _: replace(reduction, group=None))


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
