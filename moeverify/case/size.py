"""How large the models and runs of a case may be: far above all that exist, and below what would hang a command."""

from __future__ import annotations

import math

from moeverify.case.schema import ReferenceModel

MOST_LAYERS = 10_000
MOST_PARAMETERS = 10**14
MOST_TOKENS = 10**9
"""In the batch of one step."""

MOST_STEPS = 10**6
MOST_WORDS = 2**31 - 1
"""Rows of a vocabulary: indices of torch's kernels have 32 bits."""


def estimate_parameters(model: ReferenceModel) -> int:
    """Return about how many parameters a model has: those of its matrices."""
    attention = 2 * model.hidden * model.head_dim * (model.num_heads + model.num_kv_heads)
    dense = 3 * model.hidden * model.ffn_hidden
    moe = model.moe
    sparse = 3 * model.hidden * (moe.num_experts * moe.expert_hidden + moe.shared_hidden) if moe else dense
    num_dense = min(model.num_dense_layers, model.num_layers) if moe else model.num_layers
    blocks = model.num_layers * attention + num_dense * dense + (model.num_layers - num_dense) * sparse
    return 2 * model.vocab_size * model.hidden + blocks


def describe_excess(model: ReferenceModel) -> tuple[str, str] | None:
    """Return the field that makes a model larger than any, and how; None for one that may exist."""
    if model.num_layers > MOST_LAYERS:
        return "num_layers", f"num_layers {model.num_layers} is above {MOST_LAYERS}"
    if model.vocab_size > MOST_WORDS:
        return "vocab_size", f"vocab_size {model.vocab_size} is above {MOST_WORDS}"
    count = estimate_parameters(model)
    if count > MOST_PARAMETERS:
        size = f"about 1e{math.log10(count):.0f}"  # a float may be too small for it, its logarithm is not
        return (
            "hidden",
            f"a model of these sizes has {size} parameters, and more than 1e14 have no place anywhere",
        )
    return None
