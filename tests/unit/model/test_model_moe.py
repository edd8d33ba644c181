from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moeverify.model.dispatcher import LocalDispatcher, permute, unpermute
from moeverify.model.init import initial_values
from moeverify.model.moe import MoELayer

H = 16


def make_block(spec, make_spec, **options) -> MoELayer:
    factory = {"dtype": torch.float64, "device": torch.device("cpu")}
    moe = MoELayer(H, spec, mlp_bias=True, backend="loop", factory=factory, **options)
    whole = make_spec(moe=spec)
    for name, tensor in [*moe.named_parameters(), *moe.named_buffers()]:
        index = torch.arange(tensor.numel()).view(tensor.shape)
        tensor.data = initial_values(whole, 1, name, tuple(tensor.shape), index)
    return moe


def compute_densely(moe: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """Apply every expert to every token, then sum with one-hot weights: no sorting, no dispatch."""
    spec, routing = moe.router.spec, moe.router(x)
    one_hot = functional.one_hot(routing.ids, spec.num_experts).to(x.dtype)
    weights = torch.einsum("bsk,bske->bse", routing.weights, one_hot)
    gate = torch.einsum("bsh,efh->bsef", x, moe.experts.gate)
    up = torch.einsum("bsh,efh->bsef", x, moe.experts.up)
    if spec.expert_bias:
        gate, up = gate + moe.experts.gate_bias, up + moe.experts.up_bias
    out = torch.einsum("bsef,ehf->bseh", gate / (1 + torch.exp(-gate)) * up, moe.experts.down)
    if spec.expert_bias:
        out = out + moe.experts.down_bias
    y = torch.einsum("bse,bseh->bsh", weights, out)
    if moe.shared is not None:
        shared = moe.shared(x)
        if moe.shared_gate is not None:
            shared = (
                shared * torch.sigmoid(torch.einsum("bsh,h->bs", x, moe.shared_gate.weight[0]))[..., None]
            )
        y = y + shared
    return y


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score": "softmax", "renormalize": False, "expert_bias": False},
        {"top_k": 1, "renormalize": False},
        {"top_k": 12, "num_groups": 1, "top_groups": 1, "idle_experts": 0},
        {"shared_gate": False},
        {"shared_gate": False, "shared_hidden": 0},
    ],
)
def test_dispatch_equals_every_expert_on_every_token(make_moe, make_spec, make_normal, changes) -> None:
    moe = make_block(make_moe(**changes), make_spec)
    x = make_normal(3, 7, H).requires_grad_()
    slope = make_normal(3, 7, H, seed=4)
    inputs = [x, *moe.parameters()]
    outputs = [moe(x)[0], compute_densely(moe, x)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-13)
    actual, expected = (torch.autograd.grad((y * slope).sum(), inputs, allow_unused=True) for y in outputs)
    for index, pair in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            *pair, rtol=1e-11, atol=1e-12, msg=lambda text, i=index: f"input {i}: {text}"
        )


def test_idle_experts_get_no_token(make_moe, make_spec, make_normal) -> None:
    moe = make_block(make_moe(idle_experts=2, num_groups=1, top_groups=1), make_spec)
    y, stats = moe(make_normal(50, 20, H))
    assert (stats.counts[:, -2:] == 0).all()
    assert (stats.counts.sum(dim=0)[:-2] > 0).all()
    y.sum().backward()
    assert (moe.experts.gate.grad[-2:] == 0).all()


def test_a_token_does_not_depend_on_its_neighbours(make_moe, make_spec, make_normal) -> None:
    moe, x = make_block(make_moe(), make_spec), make_normal(3, 7, H)
    together = moe(x)[0]
    for row in range(3):
        for token in range(7):
            alone = moe(x[row : row + 1, token : token + 1])[0]
            torch.testing.assert_close(together[row, token], alone[0, 0], rtol=1e-12, atol=1e-13)


def test_validity_reaches_the_router(make_moe, make_spec, make_normal) -> None:
    moe, x = make_block(make_moe(), make_spec), make_normal(2, 4, H)
    valid = torch.tensor([[True, True, False, False], [True, False, False, False]])
    y, stats = moe(x, valid)
    assert stats.counts.sum(dim=1).tolist() == [6, 3]
    assert torch.equal(y, moe(x)[0])


def test_permute_sorts_by_expert_then_token() -> None:
    x = torch.arange(4.0).unsqueeze(1)
    ids = torch.tensor([[2, 0], [0, 3], [2, 3], [0, 2]])
    copies = permute(x, ids, 5)
    assert copies.x.flatten().tolist() == [0, 1, 3, 0, 2, 3, 1, 2]
    assert copies.counts.tolist() == [3, 0, 3, 2, 0]
    assert copies.order.tolist() == [1, 2, 6, 0, 4, 7, 3, 5]


def test_permute_of_no_tokens() -> None:
    copies = permute(torch.zeros(0, 3), torch.zeros(0, 2, dtype=torch.int64), 4)
    assert copies.x.shape == (0, 3)
    assert copies.counts.tolist() == [0, 0, 0, 0]
    assert unpermute(copies.x, copies.order, torch.zeros(0, 2)).shape == (0, 3)


def test_unpermute_brings_copies_home_and_weighs_them(make_normal) -> None:
    x, weights = make_normal(30, 3), make_normal(30, 4, seed=1)
    ids = make_normal(30, 9, seed=2).argsort(dim=-1)[:, :4]
    copies = permute(x, ids, 9)
    back = unpermute(copies.x, copies.order, weights)
    torch.testing.assert_close(back, x * weights.sum(dim=1, keepdim=True), rtol=1e-13, atol=1e-13)


def test_the_combine_of_bfloat16_is_in_float32() -> None:
    # (1 + 2^-7)^2 = 1 + 2^-6 + 2^-14: bfloat16 would drop the last addend before the rest cancels.
    y = torch.tensor([[1 + 2**-7], [-1 - 2**-6]], dtype=torch.bfloat16)
    weights = torch.tensor([[1 + 2**-7, 1.0]], dtype=torch.bfloat16)
    combined = unpermute(y, torch.arange(2), weights)
    assert combined.dtype == torch.bfloat16
    assert combined.item() == 2**-14


def test_the_dispatcher_calls_the_experts_with_sorted_tokens(make_normal) -> None:
    x, ids, weights = make_normal(6, 3), torch.tensor([[1], [0], [1], [3], [0], [1]]), torch.ones(6, 1)
    seen = []

    def experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        seen.append((rows, counts))
        return rows * torch.arange(4.0).repeat_interleave(counts).unsqueeze(1)

    y = LocalDispatcher(4)(x, ids, weights, experts)
    assert torch.equal(y, x * ids)
    assert torch.equal(seen[0][0], x[[1, 4, 0, 2, 5, 3]])
    assert seen[0][1].tolist() == [2, 3, 0, 1]


def test_the_dispatcher_can_be_replaced(make_moe, make_spec, make_normal) -> None:
    moe, x = make_block(make_moe(shared_hidden=0, shared_gate=False), make_spec), make_normal(2, 4, H)
    moe.dispatcher = lambda tokens, ids, weights, experts: tokens * weights.sum(dim=1, keepdim=True)
    torch.testing.assert_close(moe(x)[0], x * 2.5)
