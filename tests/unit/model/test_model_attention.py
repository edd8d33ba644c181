from __future__ import annotations

import copy
import math

import pytest
import torch

from moeverify.model.attention import Attention, attend, causal_core
from moeverify.model.attention_cores.fused import fused_core
from moeverify.model.init import initial_values
from moeverify.model.rope import compute_rotation, rotate

B, S, HEADS, KV_HEADS, D = 2, 7, 4, 2, 8


def arange(num_rows: int = B, num_tokens: int = S) -> torch.Tensor:
    return torch.arange(num_tokens).expand(num_rows, num_tokens)


def make_attention(spec) -> Attention:
    attention = Attention(spec, {"dtype": torch.float64, "device": torch.device("cpu")})
    for name, parameter in attention.named_parameters():
        index = torch.arange(parameter.numel()).view(parameter.shape)
        parameter.data = initial_values(spec, 3, name, tuple(parameter.shape), index)
    return attention


def test_attend_equals_a_sum_over_keys_one_query_at_a_time(make_normal) -> None:
    q, k, v = (
        make_normal(B, S, HEADS, D),
        make_normal(B, S, KV_HEADS, D, seed=1),
        make_normal(B, S, KV_HEADS, D),
    )
    expected = torch.zeros_like(q)
    for row in range(B):
        for query in range(S):
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                weights = [
                    math.exp(float(q[row, query, head] @ k[row, key, kv_head]) / math.sqrt(D))
                    for key in range(query + 1)
                ]
                for key, weight in enumerate(weights):
                    expected[row, query, head] += v[row, key, kv_head] * weight / sum(weights)
    torch.testing.assert_close(causal_core(q, k, v, arange()), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
def test_the_fused_core_is_the_definition(make_normal, kv_heads) -> None:
    q, k, v = (
        make_normal(B, S, HEADS, D),
        make_normal(B, S, kv_heads, D, seed=1),
        make_normal(B, S, kv_heads, D),
    )
    expected, actual = causal_core(q, k, v, arange()), fused_core(q, k, v, arange())
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("most", [1 << 27, 2 * HEADS * S * S - 1, HEADS * 3 * S, 1])
def test_chunks_of_scores_equal_the_definition(make_normal, monkeypatch, most) -> None:
    monkeypatch.setattr("moeverify.model.attention.MOST_SCORES", most)
    inputs = [
        make_normal(B, S, heads, D, seed=heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    expected, actual = attend(*inputs, arange(), arange()), causal_core(*inputs, arange())
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    weight = make_normal(*expected.shape, seed=9)
    grads = [torch.autograd.grad((output * weight).sum(), inputs) for output in (expected, actual)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("most", "is_kept"), [(1 << 27, True), (128, False)])
def test_chunks_keep_no_scores_for_the_backward_pass(make_normal, monkeypatch, most, is_kept) -> None:
    monkeypatch.setattr("moeverify.model.attention.MOST_SCORES", most)
    sizes: list[int] = []
    inputs = [make_normal(2, 16, 2, 2, seed=seed).requires_grad_() for seed in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        causal_core(*inputs, arange(2, 16)).sum()
    assert (max(sizes) > 128) is is_kept


def test_shared_key_value_heads_equal_repeated_ones(make_normal) -> None:
    q, k, v = (
        make_normal(B, S, HEADS, D),
        make_normal(B, S, KV_HEADS, D, seed=1),
        make_normal(B, S, KV_HEADS, D),
    )
    repeated = [tensor.repeat_interleave(HEADS // KV_HEADS, dim=2) for tensor in (k, v)]
    torch.testing.assert_close(
        causal_core(q, k, v, arange()), causal_core(q, *repeated, arange()), rtol=1e-14, atol=1e-14
    )


def test_causality_is_by_position_not_by_place(make_normal) -> None:
    q, k, v = (make_normal(B, S, HEADS, D, seed=seed) for seed in range(3))
    order = torch.randperm(S, generator=torch.Generator().manual_seed(0))
    moved = causal_core(q[:, order], k[:, order], v[:, order], arange()[:, order])
    torch.testing.assert_close(moved, causal_core(q, k, v, arange())[:, order], rtol=1e-13, atol=1e-13)


def test_a_part_of_the_queries_sees_all_keys_before_them(make_normal) -> None:
    q, k, v = (make_normal(B, S, HEADS, D, seed=seed) for seed in range(3))
    part = attend(q[:, 4:], k, v, arange()[:, 4:], arange())
    torch.testing.assert_close(part, causal_core(q, k, v, arange())[:, 4:], rtol=1e-13, atol=1e-13)


def test_a_query_equal_in_position_sees_its_key_and_no_later_one(make_normal) -> None:
    q, k = make_normal(1, 3, 1, D), make_normal(1, 3, 1, D, seed=1)
    v = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).view(1, 3, 1, 1).expand(1, 3, 1, D)
    out = causal_core(q, k, v, arange(1, 3))
    assert torch.equal(out[0, 0, 0], v[0, 0, 0])
    assert (out[0, 1] < 10).all()


def test_softmax_of_bfloat16_is_in_float32(make_normal) -> None:
    # Scores of about 20, times a scale that bfloat16 cannot hold: rounded once more they would move by 0.1.
    q, k, v = (make_normal(1, 32, 1, D, seed=seed).mul(3).to(torch.bfloat16) for seed in range(3))
    scores = (q[0, :, 0] @ k[0, :, 0].T).double() * D**-0.5
    later = torch.ones(32, 32, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ v[0, :, 0].double()
    actual = causal_core(q, k, v, arange(1, 32))
    assert actual.dtype == torch.bfloat16
    assert (actual[0, :, 0] - expected).norm() <= 2.4e-3 * expected.norm()


def test_scores_after_rope_depend_on_the_distance_only(make_normal) -> None:
    q, k = make_normal(1, 1, 1, D), make_normal(1, 1, 1, D, seed=1)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, compute_rotation(torch.tensor([[position]]), D, 10000.0))
            for x, position in ((q, query_position), (k, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)
    assert score(9, 4) != pytest.approx(score(4, 9), rel=1e-3)


def test_rope_turns_halves_as_complex_numbers(make_normal) -> None:
    x, positions = make_normal(B, S, HEADS, D), arange() + 5
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    frequency = torch.tensor([500.0 ** (-2 * pair / D) for pair in range(D // 2)], dtype=torch.float64)
    turned = pairs * torch.exp(1j * positions[..., None, None] * frequency)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    actual = rotate(x, compute_rotation(positions, D, 500.0))
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_rope_of_far_positions_is_exact_in_float32(make_normal) -> None:
    x, positions = make_normal(1, 1, 1, D), torch.tensor([[1_000_003]])
    rotation = compute_rotation(positions, D, 10000.0)
    expected = rotate(x, rotation)
    torch.testing.assert_close(rotate(x.float(), rotation).double(), expected, rtol=0, atol=1e-6)


def test_rope_of_bfloat16_is_rounded_once(make_normal) -> None:
    x, rotation = make_normal(B, S, HEADS, D).to(torch.bfloat16), compute_rotation(arange(), D, 10000.0)
    error = (rotate(x, rotation).double() - rotate(x.double(), rotation)).abs()
    assert (error <= 2**-8 * rotate(x.double(), rotation).abs() + 1e-6).all()


def test_the_whole_module_is_project_norm_rotate_attend_project(make_spec, make_normal) -> None:
    spec = make_spec(rope_theta=77.0)
    attention, x, positions = make_attention(spec), make_normal(B, S, spec.hidden), arange() + 2

    def heads(linear, norm) -> torch.Tensor:
        projected = (x @ linear.weight.T + linear.bias).view(B, S, -1, D)
        if norm is None:
            return projected
        root = (projected.pow(2).mean(dim=-1, keepdim=True) + spec.norm_eps).sqrt()
        return rotate(projected / root * norm.weight, compute_rotation(positions, D, 77.0))

    q = heads(attention.q_proj, attention.q_norm)
    k, v = heads(attention.k_proj, attention.k_norm), heads(attention.v_proj, None)
    mixed = causal_core(q, k, v, positions).flatten(2)
    expected = mixed @ attention.o_proj.weight.T + attention.o_proj.bias
    torch.testing.assert_close(attention(x, positions), expected, rtol=1e-12, atol=1e-12)


def test_shards_of_whole_heads_add_up(make_spec, make_normal) -> None:
    spec = make_spec(qk_norm=False)
    attention, x = make_attention(spec), make_normal(B, S, spec.hidden)
    total = torch.zeros_like(x)
    for shard in range(2):
        part = copy.deepcopy(attention)
        for linear in (part.q_proj, part.k_proj, part.v_proj):
            linear.weight.data = linear.weight.data.chunk(2)[shard]
            linear.bias.data = linear.bias.data.chunk(2)[shard]
        part.o_proj.weight.data = part.o_proj.weight.data.chunk(2, dim=1)[shard]
        part.o_proj.bias.data = part.o_proj.bias.data / 2
        total = total + part(x, arange())
    torch.testing.assert_close(total, attention(x, arange()), rtol=1e-12, atol=1e-12)


def test_the_core_can_be_replaced(make_spec, make_normal) -> None:
    attention, x, seen = make_attention(make_spec()), make_normal(B, S, 16), []

    def core(q, k, v, positions):
        seen.append([tuple(tensor.shape) for tensor in (q, k, v, positions)])
        return causal_core(q, k, v, positions) * 0

    attention.core = core
    torch.testing.assert_close(attention(x, arange()), attention.o_proj.bias.expand(B, S, -1))
    assert seen == [[(B, S, HEADS, D), (B, S, KV_HEADS, D), (B, S, KV_HEADS, D), (B, S)]]
