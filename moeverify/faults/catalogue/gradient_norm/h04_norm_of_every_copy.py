"""FSDP1 without sharding sums the norms of whole gradients over the ranks, once per copy."""

from __future__ import annotations

from moeverify.faults.catalogue.gradient_norm.measured import sum_squares_over_world
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Sum squares over all ranks of FSDP, which in this case hold copies and no shards."""
    sum_squares_over_world(patch, lambda shards, is_flat: is_flat)


FAULT = Fault(
    number="H04",
    title="the gradient norm of FSDP1 without sharding counts every copy",
    source="pytorch/pytorch PR #88955",
    mechanism="clip_grad_norm_ sums the squares over the process group whether or not its ranks hold shards: sqrt(n)",
    trigger="FSDP1 with NO_SHARD",
    case=make_case("h04", preset="tiny-gpt", dp_replicate=2, data_parallel="fsdp1"),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)
