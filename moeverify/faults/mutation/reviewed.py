"""What people have found out about mutants: those that change nothing, and causes that no rule can judge."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.mutation import CauseVerdict

_ONE_LAYOUT = "a mutant lives for one case, in which this number never changes"
_NUMBERS_ALONE = "the graph is kept longer than it must be, and nothing goes backward through it again"

EQUIVALENT: Mapping[str, str] = {
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
"""Mutants that compute the same as the code that they were made of, by name, each with the reason."""

_BALANCE = (
    "only a reported number is wrong: the balance loss is 0.473717x the expected value; the gradients match"
)
_MODULE = "the module is right, and what happens in it is not said"

BY_HAND: Mapping[tuple[str, str], tuple[CauseVerdict, str]] = {
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
        "no initial_weight of experts differs in what the ranks of one ep group hold",
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
}
"""(verdict, reason) for (name of a mutant, the cause in words) that the rules leave open: other words reopen it."""
