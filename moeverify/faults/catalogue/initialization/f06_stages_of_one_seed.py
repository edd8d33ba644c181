"""Each pipeline stage counts its layers from zero, and starts from the same values."""

from __future__ import annotations

from dataclasses import replace

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Fill the second stage's layer with the values of the first stage's layer."""
    import torch

    from moeverify.cases.schema import ReferenceModel
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def fill_by_place(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        name = shard.name.replace("layers.1.", "layers.0.")
        original(spec, seed, replace(shard, name=name), dtype)


FAULT = Fault(
    number="F06",
    title="the stages of a pipeline start as copies",
    source="pytorch/pytorch issue #139304; pytorch/torchtitan issue #514, PR #689",
    mechanism=(
        "all stages draw their layers under one seed, so that a layer equals the one of its place in "
        "another stage"
    ),
    trigger="a pipeline",
    case=make_case("f06", preset="stress-tied", pp=2, micro_batches=2),
    expected=Expected(where=(At(name="layers.1.*"),), causes=(Cause.DUPLICATE,)),
    inject=inject,
    is_moe=False,
)
