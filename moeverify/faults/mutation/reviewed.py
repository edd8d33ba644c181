"""Manual reviews of mutants that compute the same as the original code."""

from __future__ import annotations

from collections.abc import Mapping

_ONE_LAYOUT = "a mutant lives for one case, in which this number never changes"
_NUMBERS_ALONE = "the graph is kept longer than it must be, and nothing goes backward through it again"

_NO_GRAPH = "no graph is recorded there: it is inside of an autograd function, or under no_grad"
_GATHERS_ITSELF = "the projections that follow gather a DTensor to what they need themselves"

EQUIVALENT: Mapping[str, str] = {
    "train.pipeline:StageWork.add:other-condition:2": (
        "a model without experts has no routers, and the losses of no routers are zeros, which are added"
    ),
    "train.routing:update_selection_bias:other-condition:1": (
        "a router has a bias wherever the rate is above 0, and one that moves at the rate 0 does not move"
    ),
    "parallel.recompute:_Replaying.__exit__:skip-statement:2": (
        "every forward pass is given its choice before it begins: what a recomputation leaves behind is never read"
    ),
    "parallel.plan:_flat:other-group:0": (
        "where the two sizes differ a flat shard is alone in its group, and the sum over that changes nothing"
    ),
    "parallel.collectives:_Exchange.backward:add-detach:0": _NO_GRAPH,
    "parallel.collectives:_Exchange.forward:add-detach:0": _NO_GRAPH,
    "parallel.context_parallel.allgather:AllGatherCore.__call__:stale:0": _ONE_LAYOUT,
    "parallel.fsdp2:_accumulation.micro_batch:skip-statement:0": (
        "gradients are reduced in each micro-batch instead of once: the sum is the same and costs more"
    ),
    "parallel.moe_tensor:GatheringDispatcher.__call__:swap-collective:1": (
        "the two differ in their backward, and the numbers of experts have no gradient"
    ),
    "parallel.moe_tensor:apply_token_slices:other-placement:1": (
        "an MLP takes tokens one by one: gathered and scattered along another dim, each comes back to its place"
    ),
    "parallel.recompute:_Replaying.__enter__:skip-statement:1": (
        "the recomputation chooses the same experts by itself, from the same bits"
    ),
    "parallel.tensor:_parallelize_attention:other-placement:1": _GATHERS_ITSELF,
    "parallel.tensor:parallelize_mlp:other-placement:1": _GATHERS_ITSELF,
    "train.assemble:share_of:off-by-one:1": (
        "each rank of cp sees the positions of the next one, and says so: everything is compared by position"
    ),
    "train.clipping:gradient_norm:add-detach:0": _NO_GRAPH,
    "train.objective:_balance:add-detach:0": "it is asked for its dtype alone",
    "train.objective:_balance:other-dim:1": "what is left is summed over all dims in the next line",
    "train.objective:count_valid:chunk-order:0": "counts of the micro-batches are added in another order",
    "train.objective:count_valid:off-by-one:0": "tokens are counted from another one on: their number is the same",
    "train.objective:router_losses:chunk-order:0": "the losses of the layers are added in another order",
    "train.pipeline:StageWork.add:lost-term:0": "adding zero keeps a stage from returning its input, and no more",
    "train.pipeline:StageWork.add:narrow-dtype:0": "zeros in float32 are zeros, and what is added to them is float64",
    "train.pipeline:StageWork.loss:skip-detach:0": _NUMBERS_ALONE,
    "train.pipeline:StageWork.loss:skip-detach:1": _NUMBERS_ALONE,
    "train.routing:update_selection_bias:other-condition:3": "a bias that moves at the rate 0 does not move",
    "parallel.context_parallel.alltoall:AllToAllCore.to_heads:stale:0": _ONE_LAYOUT,
    "parallel.data_parallel.fsdp2:_Fsdp2.apply:stale:0": _ONE_LAYOUT,
    "parallel.plan:parallelize:stale:0": _ONE_LAYOUT,
    "parallel.fsdp2:expert_divisor:other-denominator:0": (
        "FSDP2 averages over its own mesh and the rest is divided at the end: the same quotient on every mesh"
    ),
    "parallel.tensor:_parallelize_latent:stale:0": "all layers share one mesh, and so one function",
    "parallel.pipeline:Pipeline.run:skip-statement:5": "the next run sets the work of each stage anew",
    "train.assemble:share_of:stale:0": _ONE_LAYOUT,
    "train.clipping:gradient_norm:chunk-order:0": "a sum of squares in another order differs by rounding alone",
    "train.forward:reference_losses:skip-detach:2": _NUMBERS_ALONE,
    "train.loop:_run_one_by_one:skip-detach:0": _NUMBERS_ALONE,
    "parallel.collectives:sum_over:skip-detach:0": (
        "every caller sums integers, or runs in the forward of an autograd function or under no_grad"
    ),
    "parallel.context_parallel.ring:RingExchangeCore.__call__:skip-detach:0": (
        "a softmax is the same whatever is subtracted from all scores of a row, and so is its gradient"
    ),
    "parallel.context_parallel.ring:RingExchangeCore._pass_on:reorder:0": (
        "the ring turns the other way round: keys carry their positions, and the largest score is kept as they come"
    ),
    "parallel.tensor:_parallelize_tied_head.prepare:drop-collective:0": (
        "the product of two DTensors redistributes its input itself, to the same placement"
    ),
}
"""Mutants that compute the same as the original code, by name, each with the reason."""
