"""Number of floating-point operations to train the reference model. Does not import torch."""

from __future__ import annotations

from moeverify.cases.schema import MoE, ReferenceModel


def count_training_flops(model: ReferenceModel, seq_len: int) -> int:
    """Return the operations of the forward and backward pass per token, in rows of `seq_len` tokens.

    Counts only matrix products, with one multiplication and one addition per term, at three times the
    forward pass. Causal attention counts the needed half. Recomputation in a layout does not count. Units:
    operations.
    """
    attention = _count_attention(model, seq_len)
    total = 2 * model.hidden * model.vocab_size
    for layer in range(model.num_layers):
        dense = model.moe is None or layer < model.num_dense_layers
        total += attention + (
            _count_mlp(model) if model.moe is None or dense else _count_moe(model, model.moe)
        )
    return 3 * total


def _count_attention(model: ReferenceModel, seq_len: int) -> int:
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    projections = 2 * model.hidden * (2 * query + 2 * key)
    # scores and weighted values: each 2 * query * (seq_len + 1) / 2
    return projections + 2 * query * (seq_len + 1)


def _count_mlp(model: ReferenceModel) -> int:
    return 2 * (3 if model.activation == "swiglu" else 2) * model.hidden * model.ffn_hidden


def _count_moe(model: ReferenceModel, moe: MoE) -> int:
    widths = moe.num_experts + 3 * (moe.top_k * moe.expert_hidden + moe.shared_hidden) + moe.shared_gate
    return 2 * model.hidden * widths
