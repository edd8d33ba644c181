"""How many floating-point operations training the reference model takes, by its definition. No torch."""

from __future__ import annotations

from moeverify.case.schema import MoE, ReferenceModel


def count_training_flops(model: ReferenceModel, seq_len: int) -> int:
    """Return the operations of forward and backward for one token in a row of `seq_len` tokens.

    Matrix products only, a multiplication and an addition each, three times those of the forward pass; causal
    attention counts the half that is needed; what a layout computes again does not count. Units: operations.
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
    return projections + 2 * query * (seq_len + 1)  # scores and mix: each 2 * query * (seq_len + 1) / 2


def _count_mlp(model: ReferenceModel) -> int:
    return 2 * (3 if model.activation == "swiglu" else 2) * model.hidden * model.ffn_hidden


def _count_moe(model: ReferenceModel, moe: MoE) -> int:
    widths = moe.num_experts + 3 * (moe.top_k * moe.expert_hidden + moe.shared_hidden) + moe.shared_gate
    return 2 * model.hidden * widths
