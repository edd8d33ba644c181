"""Manual reviews of mutants: equivalent ones, and causes that no rule can judge."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.mutation import CauseVerdict

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

_BALANCE = (
    "only a reported number is wrong: the balance loss is 0.473717x the expected value; the gradients match"
)
_MODULE = "the module is right, and what happens in it is not said"

_COUNTS = "the counts are wrong first; that they are of other tokens is not said"
_ROOT = "the output of layers.0.attention.q_norm is 0.707109x the expected value"
_NO_ROOT = "module and factor are right; that it is 1/sqrt(tp) is not said"
_NOT_REDUCED = "8 gradients are not reduced over tp: the 2 replicas sum to the expected value"
_DOUBLED = (
    "8 gradients are 2x too large; 2 = ep = etp = dp_shard = tp (ambiguous in this layout); not confirmed, 49 of the "
    "57 gradients with the same placement on ep match"
)

BY_HAND: Mapping[tuple[str, str], tuple[CauseVerdict, str]] = {
    (
        "parallel.plan:parallelize:other-group:6",
        "the gradients match, and the gradient norm is 1.41421x too large; "
        "squared: 2 = dp_replicate = dp_shard (ambiguous in this layout)",
    ): (
        "right",
        "the replicas of a shard are counted as if they were shards: dp_replicate is one of the two",
    ),
    (
        "train.assemble:sums_of:other-group:5",
        "only a reported number is wrong: the routing counts of 2 router tensors are 2x too large; "
        "the choice of experts matches",
    ): ("place", "the factor is right; the axis is not said"),
    (
        "parallel.context_parallel.ring:RingExchangeCore.__call__:other-reduction:0",
        "the output of layers.0.attention is 8x too large",
    ): ("place", "module and factor are right; that it is a mean over 8 positions is not said"),
    (
        "parallel.collectives:sum_over:other-reduction:0",
        "rank 0 counts 177 choices of experts where 276 are expected",
    ): ("place", "the counts are wrong first; that a maximum took the place of a sum is not said"),
    (
        "parallel.plan:list_reductions:lost-term:1",
        "15 gradients are not reduced over tp: the 2 replicas sum to the expected value",
    ): ("right", "the reductions over tp are the term that is lost"),
    (
        "parallel.plan:_shard_model:skip-statement:1",
        "first divergence: layers.1.moe.dispatcher (inputs match, output does not)",
    ): ("place", _MODULE),
    (
        "parallel.tensor:_spread_norm.average:double-collective:1",
        "the output of layers.0.attention.q_norm is 0.707109x the expected value",
    ): ("place", "module and factor are right; that it is 1/sqrt(tp) is not said"),
    (
        "train.assemble:assemble_parallel:other-condition:0",
        "all ranks of each ep group hold the same initial_weight of experts",
    ): ("right", "the layout is not applied, and ep is the axis that should have divided the experts"),
    (
        "train.forward:reference_losses:off-by-one:3",
        "the lm loss is computed differently (routing and module outputs match)",
    ): ("place", "the loss is right; that its targets are shifted is not said"),
    (
        "train.objective:_balance:double-collective:1",
        "in 60 gradients, the part of the balance loss is 2x too large; 2 = dp_shard = cp = MoE layers (ambiguous in "
        "this layout)",
    ): ("right", "it is cp, which is among the candidates"),
    ("train.pipeline:StageWork.add:chunk-order:0", _BALANCE): (
        "place",
        "the loss is right; that it has the value of the z loss is not said",
    ),
    (
        "parallel.collectives:_sum:narrow-dtype:0",
        "only a reported number is wrong: the total loss is 1.000001x too large; the gradients match",
    ): ("place", "a reported loss is off; neither the term nor that it is rounding is said"),
    (
        "parallel.collectives:sum_over:other-group:0",
        "the balance loss is computed differently (routing and module outputs match)",
    ): ("place", "the term is right; that its counts are summed over more ranks is not said"),
    (
        "parallel.context_parallel.allgather:AllGatherCore.__call__:add-detach:1",
        "in the gradient, rows 16-27, 44-55, 72-83, 100-111 of dim 0: missing",
    ): ("right", "the rows are those of the values, which are detached"),
    (
        "parallel.data_parallel.fsdp1:_Fsdp1.apply:skip-statement:1",
        "rank 0 started from values that the seed and the name do not give",
    ): ("right", "its shards are not filled"),
    ("parallel.gradients:_reduce:double-collective:0", _DOUBLED): ("right", "tp is among the candidates"),
    ("parallel.gradients:_reduce:drop-collective:0", _NOT_REDUCED): ("right", "this sum over tp is left out"),
    ("parallel.gradients:_reduce:skip-statement:0", _NOT_REDUCED): ("right", "this sum over tp is left out"),
    (
        "parallel.meshes:build_meshes.build:off-by-one:0",
        "first divergence: layers.1.moe.dispatcher (inputs match, output does not)",
    ): ("place", "it is the first module whose groups are wrong; that the ranks have moved is not said"),
    (
        "parallel.moe_tensor:_complete:double-collective:0",
        "only a reported number is wrong: the total loss is 1.00837x too large; the gradients match",
    ): ("place", "a reported loss is off; the term and its factor are not said"),
    (
        "parallel.moe_tensor:_complete:double-collective:2",
        "only a reported number is wrong: the total loss is 1.00396x too large; the gradients match",
    ): ("place", "a reported loss is off; the term and its factor are not said"),
    (
        "parallel.moe_tensor:apply_token_slices.before:chunk-order:0",
        "rank 0 counts 276 choices of experts of each of 2 routers where 276 are expected",
    ): ("place", _COUNTS),
    (
        "parallel.moe_tensor:apply_token_slices.before:chunk-order:0",
        "rank 0 counts 276 choices of each of 2 routers, the expected number, but for other experts than expected",
    ): ("place", _COUNTS),
    ("parallel.tensor:_spread_norm.average:other-denominator:0", _ROOT): ("place", _NO_ROOT),
    ("parallel.tensor:_spread_norm.average:swap-collective:0", _ROOT): ("place", _NO_ROOT),
    (
        "train.assemble:_sum_over_groups:double-collective:0",
        "only a reported number is wrong: the routing counts of 2 router tensors are 2x too large; the choice of "
        "experts matches",
    ): ("place", "the factor is right; the axis is not said"),
    (
        "train.assemble:fill_shards:lost-term:0",
        "ranks 0, 1 started from values that the seed and the name do not give",
    ): ("right", "no parameter is filled"),
    (
        "train.clipping:clip_coefficient:lost-term:0",
        "the gradients match, and the clip coefficient is 1.000001x too large",
    ): ("place", "the coefficient is wrong; that a term is missing in it is not said"),
    (
        "train.clipping:clip_coefficient:other-denominator:1",
        "the gradients match, and the clip coefficient is 0.662438x the expected value",
    ): ("place", "the coefficient is wrong; that it is divided by the norm twice is not said"),
    (
        "train.clipping:clip_gradients:narrow-dtype:0",
        "75 updates are 1.00245x too large; their gradients match",
    ): ("place", "the factor is that of the rounding, which is not said"),
    (
        "train.clipping:gradient_norm:drop-collective:2",
        "the gradients match, and the gradient norm is not reduced over pp: the squares of the 2 replicas sum to the "
        "square of the expected value",
    ): ("right", "the sum over the stages is left out"),
    (
        "train.forward:cross_entropy:narrow-dtype:1",
        "the lm loss is computed differently (routing and module outputs match)",
    ): ("place", "the term is right; that it is rounding is not said"),
    (
        "train.forward:reference_losses:off-by-one:2",
        "rank 0 counts 276 choices of experts of each of 2 routers where 276 are expected",
    ): ("place", _COUNTS),
    (
        "train.forward:reference_losses:off-by-one:2",
        "rank 0 counts 276 choices of each of 2 routers, the expected number, but for other experts than expected",
    ): ("place", _COUNTS),
    (
        "train.loop:_run_one_by_one:off-by-one:0",
        "63 gradients are not reduced over dp_replicate: the 2 replicas sum to 2x the expected value",
    ): ("right", "no micro-batch is taken for the last one, after which DDP reduces"),
    (
        "train.objective:_balance:narrow-dtype:4",
        "in 60 gradients, the part of the balance loss is 1.00098x too large",
    ): ("place", "the term is right; that its factor is a rounding is not said"),
    (
        "train.objective:router_losses:narrow-dtype:2",
        "in 60 gradients, the part of the z loss is 0.999451x the expected value",
    ): ("place", "the term is right; that its factor is a rounding is not said"),
    (
        "train.pipeline:StageWork.add:chunk-order:0",
        "only a reported number is wrong: the balance loss has the value of the z loss; the gradients match",
    ): ("right", "the two are exchanged"),
    (
        "train.pipeline:StageWork.begin:off-by-one:0",
        "first divergence: layers.0.attention (inputs match, output does not)",
    ): ("place", "it is the first module that uses positions; that these are shifted is not said"),
    (
        "train.pipeline:StageWork.loss:chunk-order:0",
        "only a reported number is wrong: the balance loss is 0.244865x the expected value; the gradients match",
    ): ("place", "the loss is right; that it has the value of the z loss is not said"),
    (
        "train.pipeline:StageWork.loss:chunk-order:0",
        "only a reported number is wrong: the balance loss has the value of the z loss; the gradients match",
    ): ("right", "the two are exchanged"),
    (
        "train.pipeline:run_pipeline:skip-statement:5",
        "layers.0.moe.router chooses other experts (inputs match)",
    ): ("wrong", "its choice is right: what is reported is that of another micro-batch"),
    (
        "train.routing:update_selection_bias:double-collective:0",
        "only a reported number is wrong: the routing counts of 2 router tensors are 2x too large; the choice of "
        "experts matches",
    ): ("place", "the factor is right; the axis is not said"),
    (
        "train.routing:update_selection_bias:stale:0",
        "rank 0 counts 276 choices of experts where 276 are expected",
    ): ("place", _COUNTS),
    (
        "train.routing:update_selection_bias:stale:0",
        "the routing counts are copies of layers.1.moe.router",
    ): ("right", "what is kept are the counts of the first layer"),
}
"""(verdict, reason) by (mutant name, wording of the cause) for open causes. Other wording reopens them."""
