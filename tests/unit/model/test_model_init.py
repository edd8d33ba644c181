from __future__ import annotations

import hashlib
import itertools

import pytest
import torch

from moeverify.hashing import CHUNK
from moeverify.model.init import draw, initial_values, initialize
from moeverify.model.transformer import Transformer

MASK = 2**64 - 1

# The first values of `embed.weight` with seed 0: stored goldens depend on them.
KNOWN = ["-0x1.94f62b46bfc85p+0", "0x1.2b4e76b0ba503p+1", "0x1.231eaea1d322bp-1", "-0x1.640483750e5d2p-2"]


def draw_by_definition(seed: int, name: str, index: int) -> float:
    """Return the same numbers computed with Python integers, one at a time."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    digest = hashlib.sha256("\x1f".join(("init", str(seed), name)).encode()).digest()
    key = int.from_bytes(digest[:8], "little")
    bits = mix((mix((index * 0x9E3779B97F4A7C15 + key) & MASK) + key) & MASK)
    total = sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 131070) * (1.0 / ((2**32 - 1) / 3) ** 0.5)


def test_draw_is_the_definition_bit_by_bit() -> None:
    indices = [0, 1, 2, 1000, 2**31 - 1, 2**31, 2**40 + 3]
    actual = draw(7, "layers.3.moe.experts.gate", torch.tensor(indices))
    assert actual.dtype == torch.float64
    assert actual.tolist() == [draw_by_definition(7, "layers.3.moe.experts.gate", index) for index in indices]


def test_draw_has_these_values_for_ever() -> None:
    assert [value.hex() for value in draw(0, "embed.weight", torch.arange(4)).tolist()] == KNOWN


def test_a_slice_equals_the_whole() -> None:
    whole = draw(0, "x", torch.arange(10_000))
    index = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[:997]
    assert torch.equal(draw(0, "x", index), whole[index])
    assert torch.equal(draw(0, "x", torch.arange(6_000, 8_000).view(40, 50)), whole[6_000:8_000].view(40, 50))
    assert draw(0, "x", torch.tensor(77)).item() == whole[77].item()


def test_an_element_does_not_depend_on_the_chunk_that_it_is_computed_in() -> None:
    whole = draw(0, "x", torch.arange(2 * CHUNK + 6).view(2, -1))
    assert whole.shape == (2, CHUNK + 3)
    for start in (0, CHUNK - 2, 2 * CHUNK):
        near = torch.arange(start, start + 5)
        assert torch.equal(whole.reshape(-1)[near], draw(0, "x", near))


def test_draws_look_normal_and_independent() -> None:
    n = 200_000
    values = draw(1, "x", torch.arange(n))
    others = [draw(2, "x", torch.arange(n)), draw(1, "y", torch.arange(n)), values.roll(1), values.roll(64)]
    noise = 5 / n**0.5
    assert abs(values.mean()) < noise
    assert abs(values.var() - 1) < 2 * noise
    assert abs(values.pow(3).mean()) < 4 * noise
    # The sum of four uniform numbers has an excess kurtosis of -6/5/4.
    assert abs(values.pow(4).mean() - 2.7) < 10 * noise
    assert values.abs().max() < 3.47
    for other in others:
        assert abs((values * other).mean()) < noise
    assert len(values.unique()) > 0.3 * n  # a grid of 2^18 values


def test_initialize_gives_every_tensor_its_values(make_spec, make_model) -> None:
    spec = make_spec()
    model = make_model(spec, seed=5)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        index = torch.arange(tensor.numel()).view(tensor.shape)
        assert torch.equal(tensor.detach(), initial_values(spec, 5, name, tuple(tensor.shape), index)), name


def test_a_tensor_of_many_chunks_equals_one_draw(make_spec, make_model, monkeypatch) -> None:
    expected = make_model(make_spec()).state_dict()
    monkeypatch.setattr("moeverify.model.init._CHUNK", 7)
    actual = make_model(make_spec()).state_dict()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_values_by_kind(make_spec, make_model) -> None:
    spec = make_spec(hidden=64, vocab_size=512)
    state = make_model(spec).state_dict()

    def std(name: str) -> float:
        return float(state[name].std())

    norms = torch.cat([value for name, value in state.items() if name.endswith("norm.weight")])
    assert float(norms.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(norms.std()) == pytest.approx(0.1, rel=0.1)
    for name, value in state.items():
        if name.endswith("bias") and "selection" not in name:
            assert (value != 0).all(), name
            assert value.abs().max() < 0.35
    assert std("embed.weight") == pytest.approx(1, rel=0.05)
    assert std("lm_head.weight") == pytest.approx(1 / 8, rel=0.05)
    assert std("layers.1.moe.router.weight") == pytest.approx(1 / 8, rel=0.1)
    assert std("layers.1.moe.experts.gate") == pytest.approx(1 / 8, rel=0.1)
    assert std("layers.1.moe.experts.down") == pytest.approx(8**-0.5 / 6**0.5, rel=0.1)
    assert std("layers.0.attention.o_proj.weight") == pytest.approx(32**-0.5 / 6**0.5, rel=0.1)
    wide = make_model(make_spec(hidden=64, vocab_size=512, init_std=0.5)).state_dict()
    assert float(wide["lm_head.weight"].std()) == pytest.approx(0.5, rel=0.05)
    assert float(wide["layers.1.moe.router.weight"].std()) == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.parametrize("idle", [0, 3])
def test_idle_experts_start_out_of_reach(make_spec, make_moe, make_model, idle) -> None:
    model = make_model(make_spec(moe=make_moe(idle_experts=idle)))
    expected = torch.tensor([0.0] * (12 - idle) + [-2.0] * idle, dtype=torch.float64)
    for layer in ("1", "2"):
        assert torch.equal(model.layers[layer].moe.router.selection_bias, expected)


def test_experts_layers_and_tensors_are_pairwise_different(make_spec, make_model) -> None:
    state = make_model(make_spec()).state_dict()
    for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
        both = [*state[f"layers.1.moe.experts.{name}"], *state[f"layers.2.moe.experts.{name}"]]
        for a, b in itertools.combinations(both, 2):
            assert (a == b).sum() <= 1  # two draws may meet on their grid of 2^18 values
    both = state["layers.1.moe.experts.gate"], state["layers.1.moe.experts.up"]
    assert (both[0] == both[1]).sum() <= 1


def test_the_seed_changes_every_parameter(make_spec, make_model) -> None:
    one, two = (dict(make_model(make_spec(), seed=seed).named_parameters()) for seed in (0, 1))
    for name, value in one.items():
        assert (value != two[name]).any(), name


def test_narrow_models_are_rounded_from_float64(make_spec, make_model) -> None:
    wide = make_model(make_spec()).state_dict()
    narrow = make_model(make_spec(), dtype=torch.bfloat16).state_dict()
    for name, value in wide.items():
        dtype = torch.float32 if name.endswith("selection_bias") else torch.bfloat16
        assert torch.equal(narrow[name], value.to(dtype)), name


def test_a_tied_weight_suits_the_head(make_spec, make_model) -> None:
    model = make_model(make_spec(hidden=64, vocab_size=512, tie_embedding=True))
    assert float(model.embed.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert "lm_head.weight" not in model.state_dict()


def test_nothing_is_left_unfilled(make_spec) -> None:
    spec = make_spec(norm="layer")
    model = Transformer(spec)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    initialize(model, spec, 0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_building_leaves_the_global_random_state_alone(make_spec, make_model) -> None:
    before = torch.get_rng_state()
    make_model(make_spec())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_narrow_model_spreads_tokens_and_gradients(make_spec, make_moe, make_model) -> None:
    spec = make_spec(hidden=64, head_dim=16, moe=make_moe(num_groups=1, top_groups=1))
    model = make_model(spec)
    tokens = torch.randint(40, (8, 32), generator=torch.Generator().manual_seed(0))
    output = model(tokens)
    for stats in output.routers:
        counts = stats.counts.sum(dim=0)
        assert counts[-1] == 0
        assert counts[:-1].min() >= 8
        assert counts.max() < 0.6 * tokens.numel()
    torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    relative = {
        name: float(parameter.grad.norm() / parameter.detach().norm())
        for name, parameter in model.named_parameters()
    }
    assert min(relative.values()) > 5e-4 * max(relative.values())
