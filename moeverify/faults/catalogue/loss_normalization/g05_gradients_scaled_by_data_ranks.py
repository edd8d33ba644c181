"""Accumulated gradients are rescaled by the data ranks, but tokens were counted over all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Scale the finished gradients by dp / world."""
    from moeverify.cases.schema import Layout
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.plan import Parallelized, parallelize

    @patch.wrap(parallelize)
    def rescale(
        original: Original[Parallelized],
        model: Transformer,
        layout: Layout,
        meshes: Meshes,
        *args: Any,
        **named: Any,
    ) -> Parallelized:
        done = original(model, layout, meshes, *args, **named)

        def finalize() -> None:
            done.finalize()
            for shard in done.shards:
                if shard.tensor.grad is not None:
                    shard.local(shard.tensor.grad).mul_(meshes.size("loss") / layout.world_size)

        return replace(done, finalize=finalize)


FAULT = Fault(
    number="G05",
    title="gradients are tp times too small after their rescale",
    source="meta-pytorch/torchtune #2641, PR #2687",
    mechanism="tokens are counted over all ranks, gradients rescaled by the data ranks instead of the world's",
    trigger="tp, with gradients rescaled after accumulation",
    case=make_case("g05", preset="tiny-gpt", tp=2),
    expected=Expected(where=(At(axis="tp"),), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)
