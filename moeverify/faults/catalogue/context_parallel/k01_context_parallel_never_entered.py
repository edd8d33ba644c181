"""The context that splits sequences over cp is in another branch, so every rank runs whole sequences."""

from __future__ import annotations

from dataclasses import replace

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Keep all positions on each rank, and leave attention unchanged."""
    from moeverify.cases.schema import Layout, Recipe
    from moeverify.parallel.context_parallel import apply_context_parallel
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.regions.region import as_indices
    from moeverify.train.assemble import share_of
    from moeverify.train.data import Share

    @patch.wrap(share_of)
    def keep_positions(original: Original[Share], recipe: Recipe, layout: Layout, meshes: Meshes) -> Share:
        share = original(recipe, layout, meshes)
        return replace(share, positions=as_indices(range(recipe.data.seq_len)))

    patch.replace(apply_context_parallel)(lambda model, kind, group: None)


FAULT = Fault(
    number="K01",
    title="context parallelism is never applied",
    source="pytorch/torchtitan PR #1880 (92ed8b318)",
    mechanism="by its indentation the cp context is entered only with compiled autograd; else each rank runs it all",
    trigger="context parallelism",
    case=make_case("k01", preset="tiny-gpt", cp=2),
    expected=Expected(where=(At(name="axis cp"),), causes=(Cause.LAYOUT,)),
    inject=inject,
    is_moe=False,
    notes="upstream showed five times the memory; the numbers are right, as the tokens are counted once a copy too",
)
