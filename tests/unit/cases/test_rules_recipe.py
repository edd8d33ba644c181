"""Rules on the recipe and the checks: refused values, with path, message and remedy."""

from __future__ import annotations

import pytest

# Each row: fields put into the layout, fields put into the recipe, the path blamed, parts of the message and
# of the remedy. The recipe is `stress` with 8 rows of 16 tokens: 3 layers (1 dense), 8 heads, 4 kv heads,
# 16 experts in 4 groups of which 2 are kept, k = 3, one idle expert.
BROKEN = [
    (
        "",
        "moe: {num_groups: 2, top_groups: 1, top_k: 8}",
        "recipe.model.moe.top_k",
        "keep 8 experts",
        "most 7",
    ),
    ("", "head_dim: 5", "recipe.model.head_dim", "head_dim 5 is odd", "such as 6"),
    ("", "rotary_dim: 3", "recipe.model.rotary_dim", "not an even number up to head_dim", "or remove it"),
    ("", "rotary_dim: 64", "recipe.model.rotary_dim", "not an even number up to head_dim", "or remove it"),
    (
        "",
        "num_kv_heads: 8, qk_norm: false, mla: {kv_lora: 8, qk_nope: 5, qk_rope: 3, v_head: 4}",
        "recipe.model.mla.qk_rope",
        "qk_rope 3 is odd",
        "such as 4",
    ),
    (
        "",
        "num_kv_heads: 8, qk_norm: false, mla: {kv_lora: 8, qk_nope: 8, qk_rope: 2, v_head: 4}",
        "recipe.model.head_dim",
        "head_dim 8 is not qk_nope 8 + qk_rope 2 of mla",
        "write 10",
    ),
    (
        "",
        "qk_norm: false, mla: {kv_lora: 8, qk_nope: 4, qk_rope: 4, v_head: 4}",
        "recipe.model.num_kv_heads",
        "num_kv_heads 4 is not num_heads 8, as mla needs",
        "write 8",
    ),
    (
        "",
        "num_kv_heads: 8, mla: {kv_lora: 8, qk_nope: 4, qk_rope: 4, v_head: 4}",
        "recipe.model.qk_norm",
        "qk_norm has no effect on mla",
        "remove",
    ),
    (
        "",
        "attention_bias: false, attention_bias_scope: qkv",
        "recipe.model.attention_bias_scope",
        "`qkv` has no effect without attention_bias",
        "attention_bias: true",
    ),
    (
        "",
        "qk_norm: false, qk_norm_scope: all",
        "recipe.model.qk_norm_scope",
        "`all` has no effect without qk_norm",
        "qk_norm: true",
    ),
    (
        "",
        "yarn: {factor: 4, original_length: 8, beta_fast: 1}",
        "recipe.model.yarn.beta_fast",
        "beta_fast 1 is not above beta_slow 1",
        "such as 32",
    ),
    (
        "",
        "num_kv_heads: 3",
        "recipe.model.num_kv_heads",
        "num_heads 8 is not divisible by num_kv_heads 3",
        "8",
    ),
    (
        "",
        "num_dense_layers: 4",
        "recipe.model.num_dense_layers",
        "num_dense_layers 4 is above num_layers 3",
        "3",
    ),
    (
        "",
        "moe: {top_k: 16, num_groups: 1, top_groups: 1}",
        "recipe.model.moe.top_k",
        "top_k 16 is above num_experts 16 less idle_experts 1",
        "write at most 15",
    ),
    (
        "",
        "moe: {top_k: 17, idle_experts: 0}",
        "recipe.model.moe.top_k",
        "17 is above num_experts 16",
        "most 16",
    ),
    (
        "",
        "moe: {idle_experts: 16}",
        "recipe.model.moe.idle_experts",
        "less idle_experts 16",
        "at least 3 exp",
    ),
    ("", "moe: {num_groups: 3}", "recipe.model.moe.num_groups", "16 is not divisible by num_groups 3", "16"),
    (
        "",
        "moe: {top_groups: 5}",
        "recipe.model.moe.top_groups",
        "top_groups 5 is above num_groups 4",
        "most 4",
    ),
    (
        "",
        "moe: {top_k: 8}",
        "recipe.model.moe.top_k",
        "top_groups 2 keep 8 experts, of which 1 may be idle, too few for top_k 8",
        "write at most 7, or raise top_groups",
    ),
    (
        "",
        "moe: {num_groups: 16, top_groups: 8}",
        "recipe.model.moe.group_score",
        "needs 2 experts a group",
        "max",
    ),
    (
        "",
        "moe: {shared_hidden: 0}",
        "recipe.model.moe.shared_gate",
        "shared_gate needs a shared expert",
        "set",
    ),
    (
        "",
        "optimizer: {momentum: 0.9}",
        "recipe.optimizer.momentum",
        "no effect on the optimizer `adamw`",
        "sgd",
    ),
    ("", "optimizer: {name: sgd, betas: [0.8, 0.9]}", "recipe.optimizer.betas", "`sgd`", "[0.9, 0.95] over"),
    ("", "optimizer: {name: sgd, eps: 1e-6}", "recipe.optimizer.eps", "`eps` has no effect", "1e-08"),
    ("", "optimizer: {betas: [0.9, 1.0]}", "recipe.optimizer.betas", "divides by zero", "below 1"),
    (
        "",
        "tolerance: {kind: exact, factor: 2.0}",
        "checks.tolerance.factor",
        "no effect on the",
        "calibrated",
    ),
    (
        "",
        "tolerance: {kind: exact, rtol: 0.1}",
        "checks.tolerance.rtol",
        "tolerance `exact`",
        "`kind: fixed`",
    ),
    (
        "",
        "tolerance: {atol: 0.1}",
        "checks.tolerance.atol",
        "no effect on the tolerance `calibrated`",
        "fixed",
    ),
    (
        "",
        "tolerance: {kind: fixed, rtol: 0.1}",
        "checks.tolerance.kind",
        "`fixed` needs `atol`",
        "`atol: 0.0`",
    ),
    (
        "",
        "tolerance: {kind: fixed, atol: 0.1}",
        "checks.tolerance.kind",
        "`fixed` needs `rtol`",
        "`rtol: 0.0`",
    ),
]


@pytest.mark.parametrize(("layout", "recipe", "path", "message", "remedy"), BROKEN)
def test_broken_rule(check_broken, layout, recipe, path, message, remedy):
    check_broken(layout, recipe, path, message, remedy)


@pytest.mark.parametrize("top_k", [16, 17])
def test_too_many_experts_for_a_token_is_said_once(write, find_problems, compose, top_k):
    [problem] = find_problems(write("case.yaml", compose("", f"moe: {{top_k: {top_k}}}")))
    assert problem.message == f"top_k {top_k} is above num_experts 16 less idle_experts 1"
