"""Accumulated gradients are rescaled by the data ranks where the tokens were counted over all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeverify.case.schema import Layout
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.transformer import Transformer
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.plan import Parallelized
from moeverify.results.cause import Cause
from moeverify.train import assemble


def inject() -> None:
    """Scale the finished gradients by dp / world."""

    def parallelize(model: Transformer, layout: Layout, meshes: Meshes, *rest: Any) -> Parallelized:
        done = original(model, layout, meshes, *rest)

        def finalize() -> None:
            done.finalize()
            for held in done.shards:
                if held.tensor.grad is not None:
                    held.local(held.tensor.grad).mul_(meshes.size("loss") / layout.world_size)

        return replace(done, finalize=finalize)

    original = assemble.parallelize
    assemble.parallelize = parallelize


FAULT = Fault(
    number="G05",
    title="gradients are tp times too small after their rescale",
    source="meta-pytorch/torchtune #2641, PR #2687",
    mechanism="tokens are counted over all ranks, gradients rescaled by the data ranks instead of the world's",
    trigger="tp, with gradients rescaled after accumulation",
    case=make_case("g05", preset="tiny-gpt", tp=2),
    expected=Expected(where=r"axis .*\btp\b", causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)
