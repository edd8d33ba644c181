"""Upper limits on models and runs: far above all existing ones, low enough for every command to finish."""

from __future__ import annotations

import math

from moeverify.cases.schema import ReferenceModel

MOST_LAYERS = 10_000
MOST_PARAMETERS = 10**14
MOST_TOKENS = 10**9
"""Tokens of the batch of one step."""

MOST_STEPS = 10**6
MOST_WORDS = 2**31 - 1
"""Rows of a vocabulary. torch kernels use 32-bit indices."""


def estimate_parameters(model: ReferenceModel) -> int:
    """Return the approximate number of parameters, counting matrices only."""
    attention = 2 * model.hidden * model.head_dim * (model.num_heads + model.num_kv_heads)
    dense = 3 * model.hidden * model.ffn_hidden
    moe = model.moe
    sparse = 3 * model.hidden * (moe.num_experts * moe.expert_hidden + moe.shared_hidden) if moe else dense
    num_dense = min(model.num_dense_layers, model.num_layers) if moe else model.num_layers
    blocks = model.num_layers * attention + num_dense * dense + (model.num_layers - num_dense) * sparse
    return 2 * model.vocab_size * model.hidden + blocks


def describe_excess(model: ReferenceModel) -> tuple[str, str] | None:
    """Return the field that exceeds a limit, and a message, or None."""
    if model.num_layers > MOST_LAYERS:
        return "num_layers", f"num_layers {model.num_layers} is above {MOST_LAYERS}"
    if model.vocab_size > MOST_WORDS:
        return "vocab_size", f"vocab_size {model.vocab_size} is above {MOST_WORDS}"
    count = estimate_parameters(model)
    if count > MOST_PARAMETERS:
        size = f"about 1e{math.log10(count):.0f}"  # The count may overflow a float, its logarithm does not.
        return (
            "hidden",
            f"a model of these sizes has {size} parameters, and more than 1e14 have no place anywhere",
        )
    return None
