"""Context parallelism: positions and masks of a rank that has a part of each sequence.

Class K. Includes a setting that is never applied: all numbers are right, but not the memory use.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.cases.schema import Layout, Recipe
    from moeverify.parallel.meshes import Meshes
    from moeverify.train.data import Share


@fault(
    "K01",
    title="context parallelism is never applied",
    source="pytorch/torchtitan PR #1880 (92ed8b318)",
    mechanism="by its indentation the cp context is entered only with compiled autograd; else each rank runs it all",
    trigger="context parallelism",
    case=make_case("k01", preset="tiny-gpt", cp=2),
    where=(At(name="axis cp"),),
    causes=(Cause.LAYOUT,),
    is_moe=False,
    notes="upstream showed five times the memory; the numbers are right, as the tokens are counted once a copy too",
)
def k01_context_parallel_never_entered(patch: Patch) -> None:
    """Keep all positions on each rank, and leave attention unchanged."""
    from moeverify.parallel.context_parallel import apply_context_parallel
    from moeverify.parallel.regions.region import as_indices
    from moeverify.train.assemble import share_of

    @patch.wrap(share_of)
    def keep_positions(original: Original[Share], recipe: Recipe, layout: Layout, meshes: Meshes) -> Share:
        share = original(recipe, layout, meshes)
        return replace(share, positions=as_indices(range(recipe.data.seq_len)))

    patch.replace(apply_context_parallel)(lambda model, kind, group: None)


@fault(
    "K02",
    title="context parallelism gathers heads where it has cut positions",
    source="pytorch/torchtitan PR #3681 (a695565f5)",
    mechanism="Shard(2), the heads, is declared where the keys are Shard(1)",
    trigger="context parallelism by all-gather",
    case=make_case("k02", cp=2, context_parallel="allgather"),
    where=(At(name="*.attention*"),),
    causes=(Cause.FORWARD,),
    is_moe=False,
)
def k02_heads_for_positions(patch: Patch) -> None:
    """Gather keys and values (B, s, N, D) along N; positions stay local."""
    from moeverify.parallel.collectives import all_gather_sum

    @patch.wrap(all_gather_sum)
    def gather_heads(original: Original[Tensor], x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        if x.ndim != 4:
            return x
        return original(x, 2, group)


@fault(
    "K03",
    title="RoPE restarts in every chunk of a sequence",
    source="thunlp/Seq1F1B #6; NVIDIA/Megatron-LM PR #1612; PrimeIntellect-ai/prime-rl PR #2392",
    mechanism="positions are counted in the local chunk, without the offset of the rank's part of the sequence",
    trigger="context or sequence parallelism",
    case=make_case("k03", preset="tiny-gpt", cp=2, context_parallel="alltoall"),
    where=(At(name="*.attention*"),),
    causes=(Cause.FORWARD,),
    is_moe=False,
)
def k03_positions_of_the_chunk(patch: Patch) -> None:
    """Rotate by the position in the local chunk; the attention mask stays right."""
    import torch

    from moeverify.model.rope import compute_rotation

    @patch.wrap(compute_rotation)
    def rotate_locally(
        original: Original[tuple[Tensor, Tensor]], positions: Tensor, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        local = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        return original(local, *args, **named)
