from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moeverify.cases.schema import ReferenceModel
from moeverify.errors import CaseError
from moeverify.model.transformer import Transformer

B, S, V = 3, 6, 40


def make_tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed))


def test_names_and_shapes_of_everything(make_spec) -> None:
    model = Transformer(make_spec(num_layers=2))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    attention = {
        "attention_norm.weight": (16,),
        "attention.q_proj.weight": (32, 16),
        "attention.q_proj.bias": (32,),
        "attention.k_proj.weight": (16, 16),
        "attention.k_proj.bias": (16,),
        "attention.v_proj.weight": (16, 16),
        "attention.v_proj.bias": (16,),
        "attention.o_proj.weight": (16, 32),
        "attention.o_proj.bias": (16,),
        "attention.q_norm.weight": (8,),
        "attention.k_norm.weight": (8,),
        "ffn_norm.weight": (16,),
    }
    dense = {
        "mlp.gate_proj.weight": (24, 16),
        "mlp.gate_proj.bias": (24,),
        "mlp.up_proj.weight": (24, 16),
        "mlp.up_proj.bias": (24,),
        "mlp.down_proj.weight": (16, 24),
        "mlp.down_proj.bias": (16,),
    }
    moe = {
        "moe.router.weight": (12, 16),
        "moe.router.bias": (12,),
        "moe.router.selection_bias": (12,),
        "moe.experts.gate": (12, 8, 16),
        "moe.experts.up": (12, 8, 16),
        "moe.experts.down": (12, 16, 8),
        "moe.experts.gate_bias": (12, 8),
        "moe.experts.up_bias": (12, 8),
        "moe.experts.down_bias": (12, 16),
        "moe.shared.gate_proj.weight": (16, 16),
        "moe.shared.gate_proj.bias": (16,),
        "moe.shared.up_proj.weight": (16, 16),
        "moe.shared.up_proj.bias": (16,),
        "moe.shared.down_proj.weight": (16, 16),
        "moe.shared.down_proj.bias": (16,),
        "moe.shared_gate.weight": (1, 16),
    }
    assert shapes == {
        "embed.weight": (40, 16),
        **{f"layers.0.{name}": shape for name, shape in {**attention, **dense}.items()},
        **{f"layers.1.{name}": shape for name, shape in {**attention, **moe}.items()},
        "norm.weight": (16,),
        "lm_head.weight": (40, 16),
    }
    assert [name for name, _ in model.named_buffers()] == ["layers.1.moe.router.selection_bias"]


def test_names_of_a_plain_dense_model() -> None:
    spec = ReferenceModel(
        vocab_size=V,
        hidden=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden=32,
        norm="layer",
        activation="gelu",
        tie_embedding=True,
    )
    names = [name for name, _ in Transformer(spec).named_parameters()]
    assert names == [
        "embed.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention_norm.bias",
        "layers.0.attention.q_proj.weight",
        "layers.0.attention.k_proj.weight",
        "layers.0.attention.v_proj.weight",
        "layers.0.attention.o_proj.weight",
        "layers.0.ffn_norm.weight",
        "layers.0.ffn_norm.bias",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
        "norm.bias",
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_output_shapes_and_dtypes(make_spec, make_model, dtype) -> None:
    output = make_model(make_spec(), dtype=dtype)(make_tokens())
    assert output.logits.shape == (B, S, V)
    assert output.logits.dtype == dtype
    assert len(output.routers) == 2
    for stats in output.routers:
        assert stats.probability_sum.shape == stats.counts.shape == (B, 12)
        assert stats.z_sum.shape == ()
        torch.testing.assert_close(
            stats.probability_sum.sum(dim=1),
            torch.full((B,), float(S)).to(stats.probability_sum),
            rtol=1e-5,
            atol=0,
        )


def test_meta_model_has_no_storage(make_spec) -> None:
    model = Transformer(make_spec(), device="meta")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    expected = {name: tensor.shape for name, tensor in Transformer(make_spec()).state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == expected


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_blocks_add_up_by_hand(make_spec, make_model, norm, activation) -> None:
    spec = make_spec(moe=None, norm=norm, activation=activation, num_layers=2, mlp_bias=True)
    model, tokens = make_model(spec), make_tokens()

    def normalize(x, module):
        if norm == "rms":
            return functional.rms_norm(x, (16,), module.weight, spec.norm_eps)
        return functional.layer_norm(x, (16,), module.weight, module.bias, spec.norm_eps)

    x = model.embed.weight[tokens]
    positions = torch.arange(S).expand(B, S)
    for layer in range(2):
        block = model.layers[str(layer)]
        x = x + block.attention(normalize(x, block.attention_norm), positions)
        normed = normalize(x, block.ffn_norm)
        inner = block.mlp.up_proj(normed)
        if activation == "gelu":
            inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
        else:
            gate = block.mlp.gate_proj(normed)
            inner = gate * torch.sigmoid(gate) * inner
        x = x + block.mlp.down_proj(inner)
    expected = normalize(x, model.norm) @ model.lm_head.weight.T
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-12, atol=1e-12)


def test_a_token_sees_none_after_it(make_spec, make_model) -> None:
    model, tokens = make_model(make_spec()), make_tokens()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % V
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=1e-12, atol=1e-12)
    assert ((after[:, 4:] - before[:, 4:]).abs().amax(dim=-1) > 1e-4).all()


def test_positions_decide_not_the_places(make_spec, make_model) -> None:
    model, tokens = make_model(make_spec()), make_tokens()
    order = torch.tensor([0, 5, 1, 4, 2, 3])
    positions = torch.arange(S).expand(B, S)
    valid = positions < torch.tensor([[6], [3], [1]])
    expected = model(tokens, positions, valid)
    actual = model(tokens[:, order], positions[:, order], valid[:, order])
    torch.testing.assert_close(actual.logits, expected.logits[:, order], rtol=1e-12, atol=1e-12)
    for one, other in zip(actual.routers, expected.routers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_default_positions_and_validity(make_spec, make_model) -> None:
    model, tokens = make_model(make_spec()), make_tokens()
    explicit = model(tokens, torch.arange(S).expand(B, S), torch.ones(B, S, dtype=torch.bool))
    assert torch.equal(model(tokens).logits, explicit.logits)
    assert torch.equal(model(tokens).routers[1].counts, explicit.routers[1].counts)
    # Only differences of positions matter to RoPE.
    torch.testing.assert_close(
        model(tokens, torch.arange(S).expand(B, S) + 3).logits, explicit.logits, rtol=1e-11, atol=1e-11
    )
    stretched = model(tokens, torch.arange(S).expand(B, S) * 2).logits
    assert (stretched - explicit.logits).abs().max() > 1e-4


def test_padding_is_not_counted_in_any_layer(make_spec, make_model) -> None:
    valid = torch.arange(S) < torch.tensor([[6], [3], [1]])
    for stats in make_model(make_spec())(make_tokens(), None, valid).routers:
        assert stats.counts.sum(dim=1).tolist() == [18, 9, 3]


def test_a_tied_gradient_is_the_sum_of_both_uses(make_spec, make_model) -> None:
    tied, untied = make_model(make_spec(tie_embedding=True)), make_model(make_spec())
    for module in (untied.embed, untied.lm_head):
        module.weight.data = tied.embed.weight.data.clone()
    for model in (tied, untied):
        logits = model(make_tokens()).logits
        functional.cross_entropy(logits.flatten(0, 1), make_tokens(1).flatten()).backward()
    expected = untied.embed.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.embed.weight.grad, expected, rtol=1e-12, atol=1e-14)
    assert [name for name, _ in tied.named_parameters(remove_duplicate=False)].count("embed.weight") == 1
    assert not any("lm_head" in name for name in tied.state_dict())


def test_a_tie_survives_copying_and_moving(make_spec, make_model) -> None:
    original = make_model(make_spec(tie_embedding=True))
    model = copy.deepcopy(original).to(torch.float32)
    half_tied = Transformer(make_spec(), dtype=torch.float32)
    model.embed.weight.data *= 2
    half_tied.load_state_dict({**model.state_dict(), "lm_head.weight": model.embed.weight / 2})
    torch.testing.assert_close(model(make_tokens()).logits, half_tied(make_tokens()).logits * 2)
    assert original(make_tokens()).logits.dtype == torch.float64


def test_stages_compute_the_whole(make_spec, make_model) -> None:
    whole, first, last = (make_model(make_spec()) for _ in range(3))
    del first.layers["1"], first.layers["2"]
    first.norm = first.lm_head = None
    last.embed = None
    del last.layers["0"]
    assert {*first.state_dict(), *last.state_dict()} == set(whole.state_dict())
    middle = first(make_tokens())
    assert middle.logits.shape == (B, S, 16)
    assert middle.routers == ()
    output, expected = last(middle.logits), whole(make_tokens())
    assert torch.equal(output.logits, expected.logits)
    assert len(output.routers) == 2
    with pytest.raises(TypeError, match="no embedding"):
        last(make_tokens())


def test_recomputation_changes_nothing(make_spec, make_model) -> None:
    plain, recomputed = make_model(make_spec()), make_model(make_spec())
    records = []
    for model in (plain, recomputed):
        x, positions = model.embed(make_tokens()), torch.arange(S).expand(B, S)
        for block in model.layers.values():
            if model is recomputed:
                x, stats = checkpoint(block, x, positions, None, use_reentrant=False)
            else:
                x, stats = block(x, positions)
        (x.square().sum() + stats.z_sum).backward()
        records.append(model.layers["2"].moe.router.record)
    for one, other in zip(*records, strict=True):
        assert torch.equal(one, other)
    for (name, one), other in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        if one.grad is not None:
            assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_backends_agree_in_the_whole_model(make_spec, make_model, dtype) -> None:
    gradients = []
    for backend in ("loop", "grouped_mm"):
        model = make_model(make_spec(), experts=backend, dtype=dtype)
        logits = model(make_tokens()).logits
        functional.cross_entropy(logits.flatten(0, 1).double(), make_tokens(1).flatten()).backward()
        gradients.append({name: parameter.grad.double() for name, parameter in model.named_parameters()})
    bound = 1e-5 if dtype == torch.float32 else 0.1
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= bound * expected.norm(), name


def test_grouped_experts_are_refused_in_float64(make_spec) -> None:
    with pytest.raises(CaseError, match="use the loop backend"):
        Transformer(make_spec(), experts="grouped_mm")


def test_float32_is_near_float64(make_spec, make_model) -> None:
    wide, narrow = (
        make_model(make_spec(), dtype=dtype)(make_tokens()) for dtype in (torch.float64, torch.float32)
    )
    error = (narrow.logits.double() - wide.logits).norm() / wide.logits.norm()
    assert 1e-9 < error < 1e-5


def test_gradients_of_a_block_by_finite_differences(make_spec, make_moe, make_model, make_normal) -> None:
    moe = make_moe(num_experts=4, top_k=2, expert_hidden=2, num_groups=2, top_groups=2, idle_experts=1)
    spec = make_spec(
        hidden=4, head_dim=2, num_heads=2, num_kv_heads=1, num_layers=1, num_dense_layers=0, moe=moe
    )
    block = make_model(spec).layers["0"]
    x = make_normal(2, 3, 4).requires_grad_()
    positions, valid = torch.arange(3).expand(2, 3), torch.tensor([[True, True, True], [True, False, False]])
    block(x, positions, valid)
    assert block.moe.router.record.margin.min() > 1e-3  # the choice does not change within the differences
    names = [name for name, _ in block.named_parameters()]

    def compute(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, stats = functional_call(block, dict(zip(names, parameters, strict=True)), (x, positions, valid))
        return y, stats.probability_sum, stats.z_sum

    inputs = [x, *(parameter.detach().requires_grad_() for parameter in block.parameters())]
    assert torch.autograd.gradcheck(compute, inputs, eps=1e-6, atol=1e-8, rtol=1e-5, fast_mode=True)
