from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moeverify.errors import CaseError
from moeverify.model.expert_backends import grouped_mm
from moeverify.model.experts import Experts

E, H, F = 5, 16, 8


def make_experts(backend: str = "loop", *, bias: bool = True, dtype: torch.dtype = torch.float64) -> Experts:
    factory = {"dtype": dtype, "device": torch.device("cpu")}
    experts = Experts(E, H, F, bias=bias, backend=backend, factory=factory)
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return experts


def run(experts: Experts, counts: list[int], seed: int = 2) -> dict[str, torch.Tensor]:
    """Return output and gradients for random rows, as many as the counts say."""
    generator = torch.Generator().manual_seed(seed)
    dtype = experts.gate.dtype
    x = torch.randn(sum(counts), H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    slope = torch.randn(sum(counts), H, generator=generator, dtype=torch.float64).to(dtype)
    experts.zero_grad()
    y = experts(x, torch.tensor(counts, dtype=torch.int64))
    (y * slope).sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters())
    grads = {name: parameter.grad.clone() for name, parameter in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("bias", [False, True])
def test_the_loop_is_the_definition(make_normal, bias) -> None:
    experts, x = make_experts(bias=bias), make_normal(6, H)
    owner = [0, 0, 1, 3, 3, 4]
    y = experts(x, torch.tensor([2, 1, 0, 2, 1]))
    for row, expert in enumerate(owner):
        gate, up = experts.gate[expert] @ x[row], experts.up[expert] @ x[row]
        if bias:
            gate, up = gate + experts.gate_bias[expert], up + experts.up_bias[expert]
        expected = experts.down[expert] @ (gate * torch.sigmoid(gate) * up)
        if bias:
            expected = expected + experts.down_bias[expert]
        torch.testing.assert_close(y[row], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("counts", [[3, 4, 0, 1, 6], [0, 0, 0, 0, 7], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_grouped_equals_loop(dtype, tolerance, bias, counts) -> None:
    expected = run(make_experts("loop", bias=bias, dtype=dtype), counts)
    actual = run(make_experts("grouped_mm", bias=bias, dtype=dtype), counts)
    for name, value in expected.items():
        assert actual[name].dtype == dtype
        difference = (actual[name] - value).double().norm()
        assert difference <= tolerance * value.double().norm(), name


@pytest.mark.parametrize("bias", [False, True])
def test_spare_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, bias) -> None:
    experts, counts = make_experts("grouped_mm", bias=bias, dtype=torch.bfloat16), [3, 4, 0, 1, 6]
    expected = run(experts, counts)
    asked = []
    monkeypatch.setattr(grouped_mm, "count_spare_rows", lambda x, count: asked.append((len(x), count)) or 7)
    actual = run(experts, counts)
    assert asked == [(14, E)]
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_only_a_gpu_gets_spare_rows() -> None:
    assert grouped_mm.count_spare_rows(torch.zeros(128 * E, H, dtype=torch.bfloat16), E) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rows", "spare"), [(112, 0), (128, E), (129, 0)])
def test_spare_rows_lead_to_large_tiles(rows, spare) -> None:
    x = torch.zeros(rows * E, H, dtype=torch.bfloat16, device="cuda")
    assert grouped_mm.count_spare_rows(x, E) == spare


@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
def test_an_expert_without_tokens_has_a_zero_gradient(backend) -> None:
    result = run(make_experts(backend, dtype=torch.float32), [3, 4, 0, 1, 6])
    for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
        assert (result[name][2] == 0).all(), name
        assert (result[name][0] != 0).any(), name


@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
def test_no_tokens_at_all(backend) -> None:
    result = run(make_experts(backend, dtype=torch.float32), [0] * E)
    assert result["y"].shape == (0, H)
    assert all((value == 0).all() for value in result.values())


def test_grouped_refuses_float64_at_construction() -> None:
    with pytest.raises(CaseError, match=r"layout\.experts: grouped_mm cannot multiply torch\.float64 .*loop"):
        make_experts("grouped_mm")


def test_grouped_refuses_float64_at_the_call(make_normal) -> None:
    experts = make_experts("grouped_mm", dtype=torch.float32).double()
    with pytest.raises(CaseError, match="grouped_mm cannot multiply"):
        experts(make_normal(5, H), torch.ones(5, dtype=torch.int64))


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 4), (torch.bfloat16, 8)])
def test_grouped_names_every_size_that_does_not_fit(dtype, step) -> None:
    with pytest.raises(CaseError) as caught:
        Experts(
            2,
            18,
            6,
            bias=False,
            backend="grouped_mm",
            factory={"dtype": dtype, "device": torch.device("cpu")},
        )
    texts = [str(problem) for problem in caught.value.problems]
    assert len(texts) == 2
    assert f"hidden to be a multiple of {step}" in texts[0]
    assert texts[0].endswith("not 18; use the loop backend or another size")
    assert "not 6;" in texts[1]


def test_the_view_may_give_fewer_experts_than_were_declared() -> None:
    whole, part = make_experts(), make_experts()
    part.view = lambda parameter: parameter[2:4]
    x = torch.randn(5, H, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = whole(x, torch.tensor([0, 0, 2, 3, 0]))
    torch.testing.assert_close(part(x, torch.tensor([2, 3])), expected, rtol=1e-14, atol=1e-14)


def test_shards_of_the_hidden_units_add_up_with_one_down_bias() -> None:
    whole = make_experts()
    expected, total = run(whole, [3, 4, 0, 1, 6]), 0.0
    for shard in range(2):
        part = make_experts()
        part.add_down_bias = shard == 0
        for name in ("gate", "up", "gate_bias", "up_bias"):
            value = getattr(part, name)
            value.data = value.data.chunk(2, dim=1)[shard]
        part.down.data = part.down.data.chunk(2, dim=2)[shard]
        result = run(part, [3, 4, 0, 1, 6])
        total = total + result["y"]
        assert torch.equal(result["down_bias"], expected["down_bias"] * (shard == 0))
    torch.testing.assert_close(total, expected["y"], rtol=1e-12, atol=1e-12)


def test_swiglu_gates_with_silu() -> None:
    experts = make_experts(bias=False)
    x = torch.randn(1, H, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gate, up = x @ experts.gate[0].T, x @ experts.up[0].T
    expected = (functional.silu(gate) * up) @ experts.down[0].T
    torch.testing.assert_close(experts(x, torch.tensor([1, 0, 0, 0, 0])), expected)
