"""Latent attention against its equations, and the rotary embedding under YaRN against its definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeverify.cases.attention import MLA, Yarn
from moeverify.model.init import initial_values
from moeverify.model.mla import LATENT_EPS, LatentAttention
from moeverify.model.rope import compute_rotation, rotate, rotate_neighbours

B, S, HEADS = 2, 6, 2
YARN = Yarn(factor=4.0, original_length=64, beta_fast=8.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.5)


def make_attention(make_spec, *, q_lora: int, yarn: Yarn | None = None) -> LatentAttention:
    mla = MLA(q_lora=q_lora, kv_lora=6, qk_nope=4, qk_rope=4, v_head=3)
    spec = make_spec(num_heads=HEADS, num_kv_heads=HEADS, qk_norm=False, mla=mla, yarn=yarn)
    attention = LatentAttention(spec, mla, {"dtype": torch.float64, "device": torch.device("cpu")})
    for name, parameter in attention.named_parameters():
        index = torch.arange(parameter.numel()).view(parameter.shape)
        parameter.data = initial_values(spec, 5, name, tuple(parameter.shape), index)
    return attention


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + LATENT_EPS).sqrt() * weight


def turn(x: Tensor, angles: list[float]) -> Tensor:
    pairs = [complex(float(x[2 * i]), float(x[2 * i + 1])) for i in range(len(x) // 2)]
    turned = [pair * complex(math.cos(a), math.sin(a)) for pair, a in zip(pairs, angles, strict=True)]
    return torch.tensor([part for pair in turned for part in (pair.real, pair.imag)], dtype=torch.float64)


def compute_one_by_one(attention: LatentAttention, x: Tensor, scale: float) -> Tensor:
    """Return the attention's output for one row x (S, H), a token and a head at a time."""
    weights = {name: parameter.detach() for name, parameter in attention.named_parameters()}
    angles = [[p * 10000.0 ** (-2 * i / 4) for i in range(2)] for p in range(S)]
    queries, keys, values = [], [], []
    for p, token in enumerate(x):
        latent = weights["kv_a_proj.weight"] @ token + weights["kv_a_proj.bias"]
        shared = turn(latent[6:], angles[p])
        kv = (weights["kv_b_proj.weight"] @ normalize(latent[:6], weights["kv_a_norm.weight"])).view(HEADS, 7)
        if "q_proj.weight" in weights:
            q = weights["q_proj.weight"] @ token
        else:
            narrow = weights["q_a_proj.weight"] @ token + weights["q_a_proj.bias"]
            q = weights["q_b_proj.weight"] @ normalize(narrow, weights["q_a_norm.weight"])
        q = q.view(HEADS, 8)
        queries.append([torch.cat([q[n, :4], turn(q[n, 4:], angles[p])]) for n in range(HEADS)])
        keys.append([torch.cat([kv[n, :4], shared]) for n in range(HEADS)])
        values.append([kv[n, 4:] for n in range(HEADS)])
    rows = []
    for p in range(S):
        heads = []
        for n in range(HEADS):
            scores = torch.stack([queries[p][n] @ keys[t][n] * scale for t in range(p + 1)]).softmax(0)
            heads.append(sum(scores[t] * values[t][n] for t in range(p + 1)))
        rows.append(weights["o_proj.weight"] @ torch.cat(heads) + weights["o_proj.bias"])
    return torch.stack(rows)


def test_latent_attention_equals_its_equations(make_spec, make_normal) -> None:
    positions = torch.arange(S).expand(B, S)
    for q_lora in (0, 5):
        attention = make_attention(make_spec, q_lora=q_lora)
        x = make_normal(B, S, 16)
        expected = torch.stack([compute_one_by_one(attention, row, 8**-0.5) for row in x])
        torch.testing.assert_close(attention(x, positions), expected, rtol=1e-12, atol=1e-13)


def test_scores_are_scaled_as_yarn_says(make_spec, make_normal) -> None:
    plain = make_attention(make_spec, q_lora=0)
    stretched = make_attention(make_spec, q_lora=0, yarn=YARN)
    seen: list[Tensor] = []

    def core(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        seen.append(q[..., :4])
        return v

    plain.core = stretched.core = core
    x, positions = make_normal(1, S, 16), torch.arange(S).expand(1, S)
    plain(x, positions), stretched(x, positions)
    expected = seen[0] * (0.1 * 0.5 * math.log(4.0) + 1.0) ** 2
    torch.testing.assert_close(seen[1], expected, rtol=1e-14, atol=0)


def test_rotations_of_neighbours_and_of_halves_are_one_up_to_order(make_normal) -> None:
    x, rotation = make_normal(B, S, 1, 8), compute_rotation(torch.arange(S).expand(B, S), 8, 1e4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    torch.testing.assert_close(
        rotate_neighbours(x, rotation)[..., order], rotate(x[..., order], rotation), rtol=0, atol=0
    )


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    size, theta = 64, 100.0
    yarn = YARN.model_copy(update={"mscale": 0.0})
    position = torch.tensor([[1]])
    plain = torch.atan2(*reversed(compute_rotation(position, size, theta))).flatten()
    cos, sin = compute_rotation(position, size, theta, yarn)
    scale = 1.0 / (0.1 * 0.5 * math.log(4.0) + 1.0)
    torch.testing.assert_close(
        cos.square() + sin.square(), torch.full_like(cos, scale**2), rtol=1e-13, atol=0
    )
    ratio = torch.atan2(sin, cos).flatten() / plain
    turns = 64 * plain / (2 * math.pi)
    fast, slow = turns >= 8.0, turns <= 0.9
    assert fast.any()
    assert slow.any()
    torch.testing.assert_close(ratio[fast], torch.ones_like(ratio[fast]), rtol=1e-12, atol=0)
    torch.testing.assert_close(ratio[slow], torch.full_like(ratio[slow], 0.25), rtol=1e-12, atol=0)
    assert (ratio.diff() <= 1e-12).all()
