"""Kinds of tensors that a training step exposes, and the checks that compare them. No torch.

The string values are also used in JSON reports, golden files and case files.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Kind(StrEnum):
    """The kinds of logical tensors that the training loop exposes, in the order of a step.

    Shapes: B rows and S positions of the global batch, k experts per token, E experts per layer.
    """

    LOADED = "loaded"  # every tensor that a checkpoint restores, right after the load
    INITIAL_WEIGHT = "initial_weight"  # each parameter before step 0
    INITIAL_BUFFER = "initial_buffer"  # each buffer before step 0
    ROUTER_IDS = "router_ids"  # (B, S, k): the chosen experts
    ROUTER_COUNTS = "router_counts"  # (E): number of valid tokens per expert in the global batch
    ROUTER_FLIPS = (
        "router_flips"  # (B, S): with replayed routing, the margin of tokens that would choose other experts
    )
    ROUTER_MARGIN = (
        "router_margin"  # (B, S): score margin between the last chosen expert and the first expert not chosen
    )
    ROUTER_WEIGHTS = "router_weights"  # (B, S, k): combine weights of the experts' outputs
    NEAR_TIES = (
        "near_ties"  # (R, n + k): rows of n numbers near a tie, and the k indices that a user's model chose
    )
    TOKEN_LOSS = "token_loss"  # (B, S): the cross entropy of each token
    LOSS = "loss"  # (): total, lm, balance, z of the global batch
    GRADIENT = "gradient"  # gradient of each parameter, fully reduced and before the clip
    GRADIENT_NORM = "gradient_norm"  # (): total and clip coefficient
    UPDATE = "update"  # change of each parameter in the step
    WEIGHT = "weight"  # each parameter after the step
    OPTIMIZER_STATE = "optimizer_state"  # moments and step counters after the step
    BUFFER = "buffer"  # each buffer after the step


# Stored in goldens but not compared. Weights restore the state for forced steps; an update shows the same
# errors more sharply. Router margins are for replayed routing, and near ties for a user's model.
UNCOMPARED_KINDS: frozenset[str] = frozenset({Kind.WEIGHT, Kind.ROUTER_MARGIN, Kind.NEAR_TIES})

# Kinds whose golden is zero by definition.
ZERO_KINDS: frozenset[str] = frozenset({Kind.ROUTER_FLIPS})


class CheckName(StrEnum):
    """All checks in the order of a training step; an earlier check is closer to the cause.

    A new check needs a line here and an implementation in a file of
    `moeverify.verification.checks`. The third value of a line marks an expensive check, which runs only
    if a case lists it in `checks.also`.
    """

    description: str
    is_optional: bool

    def __new__(cls, value: str, description: str = "", is_optional: bool = False) -> Self:
        """Create a member equal to `value`, with the description that the docs and `--help` show."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        member.is_optional = is_optional
        return member

    LOADED = "loaded", "a loaded state against the one that was saved, bit for bit"
    INITIAL_STATE = "initial state", "weights and buffers before step 0, bit for bit"
    GATHERED_WEIGHTS = (
        "gathered weights",
        "the weights that FSDP gathers equal the stored weights, bit for bit",
    )
    DATA = "data", "the tokens, positions, masks and labels that every rank read, in each micro-batch"
    FLOAT8 = "float8", "scales, numbers and products in float8, computed again from the rank's own operands"
    ROUTING = "routing", "which experts each token chose, and their counts"
    ROUTING_FLIPS = "routing flips", "score margin of the tokens that would choose other experts"
    ROUTING_WEIGHTS = "routing weights", "the weights that combine the experts' outputs"
    ACTIVATIONS = "activations", "the output of every block, with the first block that diverges", True
    FORCED_BLOCKS = (
        "forced blocks",
        "the output of every block and the gradient of its input, each on the golden's input and output gradient",
        True,
    )
    MODULES = (
        "modules",
        "below 32 bits, each module of a user's model, computed again on one device from the rank's own inputs",
    )
    ROUTER = "router", "experts, weights and counts, computed again in float64 from the router's own input"
    LOSS = "loss", "each token's cross entropy, and the losses of the batch"
    CROSS_ENTROPY = (
        "cross entropy",
        "each token's loss, computed again from the logits of the rank's own head",
    )
    OBJECTIVE = "objective", "the losses, computed again from the ranks' own token losses and router inputs"
    ROUTER_GRADIENT = (
        "router gradient",
        "the gradients of the balance and z losses in each router, and of the router's weight",
    )
    CALLS = (
        "order of calls",
        "zero_grad, backward, clip and scheduler in the step of `recipe.step`, if there is one",
    )
    GRADIENT = "gradient", "every parameter's gradient before the clip"
    GRADIENT_SUM = (
        "gradient sum",
        "gradients of linear layers and norms, summed again over all ranks: in float8, or on request",
    )
    GRADIENT_NORM = "gradient norm", "the global norm and the clip coefficient"
    CLIP = "clip", "the norm and the clip coefficient, computed again from the ranks' own gradients"
    UPDATE = "update", "every parameter's change by the step"
    OPTIMIZER_STATE = "optimizer state", "moments and step counters"
    OPTIMIZER_STEP = (
        "optimizer step",
        "moments and updates, computed again from the rank's own gradient and state",
    )
    BUFFERS = "buffers", "the routers' selection bias"
    REBOUND = (
        "rebound",
        "every module has the tensors that the optimizer trains and a checkpoint saves; only a step changes them",
    )
    REPLICAS = "replicas", "ranks that hold the same part of a tensor hold the same bits"
    COVERAGE = "coverage", "the ranks together hold every element of every tensor of the golden"
    SHARDING = "sharding", "every axis of the layout shards the tensors that it claims to shard"
    REPEAT = "repeat", "a second run of the same layout gives the same bits"
    TRACE = "trace", "the ranks of every group issue the same collectives in the same order"
    PRECISION = (
        "precision",
        "nothing is narrower than on one device; in mixed precision: the dtypes of the recipe",
    )
    EXPERTS = "experts", "after a load every expert has the values of the expert of its number"
    RESUMED = "resumed", "the steps after a load are those of the run that was not interrupted, bit for bit"


def check_name(text: str) -> str:
    """Return the name of a check as reports write it.

    Case files may use underscores: `gradient_norm` becomes `gradient norm`. Unknown names are returned
    unchanged.
    """
    return next((name for name in CheckName if name == text.replace("_", " ")), text)
