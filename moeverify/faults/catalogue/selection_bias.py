"""The bias of loss-free balancing, a state that no gradient moves.

Class D. The bias changes by the counts of a step, outside of the optimizer. It is neither a parameter nor
optimizer state. It may be moved too often or never, cast to another dtype, or left out of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeverify.cases.schema import Recompute
from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case, make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.cases.schema import MoE, Recipe
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.parallel.regions.observer import Observer
    from moeverify.train.data import MicroBatch
    from moeverify.train.program import ReadableState, TrainingProgram


@fault(
    "D01",
    title="the selection bias moves with every micro-batch",
    source="pytorch/torchtitan PR #1304, PR #1324",
    mechanism="updated in a hook of the backward pass, so later micro-batches of a step route with another bias",
    trigger="gradient accumulation with loss-free balancing",
    case=make_case("d01", dp_shard=2, micro_batches=2),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.STATE,),
)
def d01_bias_moved_per_micro_batch(patch: Patch) -> None:
    """Move the bias after the backward pass of each micro-batch; the end of the step only reports counts."""
    from moeverify.cases.schema import ReferenceModel
    from moeverify.parallel.regions.region import Region
    from moeverify.train.routing import move_bias, observe_routing, update_selection_bias

    @patch.wrap(observe_routing)
    def move_early(
        original: Original[list[Tensor]],
        recipe: Recipe,
        program: TrainingProgram,
        batch: MicroBatch,
        observer: Observer,
        step: int,
        replayed: ReadableState | None,
    ) -> list[Tensor]:
        counts = original(recipe, program, batch, observer, step, replayed)
        moe = recipe.model.moe if isinstance(recipe.model, ReferenceModel) else None
        for router, local in zip(program.routers, counts, strict=True):
            bias = router.module.selection_bias
            if moe is not None and bias is not None:
                move_bias(bias, program.sums.over_tokens(local), moe.selection_bias_rate)
        return counts

    @patch.replace(update_selection_bias)
    def report_counts(
        moe: MoE, program: TrainingProgram, counts: Sequence[Tensor], observer: Observer, step: int
    ) -> None:
        for router, local in zip(program.routers, counts, strict=True):
            total = program.sums.over_tokens(local)
            observer.observe(step, Kind.ROUTER_COUNTS, router.name, total, Region.whole(total.shape))


@fault(
    "D03",
    title="the selection bias of later layers never moves",
    source="pytorch/torchtitan PR #3686 (cf066ac34)",
    mechanism="`return` where `continue` is meant: the first layer without a bias ends the loop over the layers",
    trigger="layers with and without balancing",
    case=make_case("d03", dp_shard=2),
    where=(At(name="layers.2.moe.router*"),),
    causes=(Cause.STALE, Cause.STATE),
    notes="the reference model balances all of its layers: the loop ends after the first of them",
)
def d03_bias_of_first_layer(patch: Patch) -> None:
    """Move only the bias of the first router; count for all."""
    from moeverify.train.routing import move_bias, update_selection_bias

    moved: list[Tensor] = []

    @patch.wrap(update_selection_bias)
    def begin(original: Original[None], *args: Any, **named: Any) -> None:
        moved.clear()
        original(*args, **named)

    @patch.wrap(move_bias)
    def move_first(original: Original[None], bias: Tensor, counts: Tensor, rate: float) -> None:
        if not moved:
            original(bias, counts, rate)
        moved.append(bias)


@fault(
    "D05",
    title="the selection bias never moves",
    source="pytorch/torchtitan PR #3666 (8e5554449)",
    mechanism="the rate is set and the load-balancing hook is not registered for this model",
    trigger="any layout with loss-free balancing",
    case=make_case("d05", dp_shard=2, ep=2),
    where=(At(name="*.selection_bias"),),
    causes=(Cause.STALE, Cause.STATE),
    notes="a bias that stays at its value is a state that moved by 0: both names are right",
)
def d05_bias_never_moved(patch: Patch) -> None:
    """Leave the bias unchanged, whatever the counts."""
    from moeverify.train.routing import move_bias

    patch.replace(move_bias)(lambda bias, counts, rate: None)


@fault(
    "D06",
    title="expert counts are not summed over tp",
    source="pytorch/torchtitan PR #4154 (f3660a493)",
    mechanism="one axis of the mesh is missing from the all-reduce of the counts",
    trigger="tp that slices tokens",
    case=make_case("d06", tp=2, ep=2),
    where=(At(name="*.moe.router*", axis="tp"),),
    causes=(Cause.STATE, Cause.MISSING_REDUCTION),
)
def d06_counts_without_tp(patch: Patch) -> None:
    """Omit tp from the sum of the counts that move the selection bias."""
    from moeverify.train.routing import update_selection_bias

    @patch.wrap(update_selection_bias)
    def count_own(
        original: Original[None], moe: MoE, program: TrainingProgram, *rest: Any, **named: Any
    ) -> None:
        sums = replace(program.sums, over_tokens=program.sums.over_batch)
        original(moe, replace(program, sums=sums), *rest, **named)


@fault(
    "D07",
    title="the selection bias is silently kept in bfloat16",
    source="pytorch/torchtitan PR #3861 (828ab9c61); NVIDIA/Megatron-LM !2895",
    mechanism="names do not match under the checkpoint wrapper, so the cast of weights takes the buffer too",
    trigger="recomputation in mixed precision",
    case=make_case("d07", dp_shard=2, recompute=True, recipe={"precision": "float32"}),
    where=(At(name="*.selection_bias"),),
    causes=(Cause.ROUNDING,),
    precisions=("float64", "float32"),
    notes="in a float32 recipe: in bfloat16 the bound of a buffer is the rounding of bfloat16 and hides it",
)
def d07_bias_in_bfloat16(patch: Patch) -> None:
    """Cast the selection bias of every router inside a recomputed block to bfloat16."""
    import torch

    from moeverify.model.router import Router
    from moeverify.parallel.recompute import apply_recompute

    @patch.wrap(apply_recompute)
    def cast_buffers(original: Original[None], model: Transformer, which: Recompute) -> None:
        original(model, which)
        for name, module in model.named_modules():
            is_renamed = "_checkpoint_wrapped_module" in name
            if is_renamed and isinstance(module, Router) and module.selection_bias is not None:
                module.selection_bias = module.selection_bias.to(torch.bfloat16)


@fault(
    "D08",
    title="the selection bias is not in the checkpoint",
    source="flagos-ai/FlagScale PR #411",
    mechanism="the bias of loss-free balancing is no persistent buffer: neither saved nor loaded",
    trigger="loss-free balancing",
    saver=make_saved_case("d08", dp_shard=2, ep=2),
    case=make_saved_case("d08", dp_shard=2, ep=2),
    where=(At(name="buffer/*.selection_bias"),),
    causes=(Cause.NOT_LOADED,),
)
def d08_bias_not_saved(patch: Patch) -> None:
    """Omit the buffers from saves and loads."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.tensors)
    def leave_out_buffers(original: Original[list[LocalShard]], self: TrainingState) -> list[LocalShard]:
        return [shard for shard in original(self) if not shard.name.startswith("buffer/")]
