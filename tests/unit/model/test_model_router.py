from __future__ import annotations

import pytest
import torch

from moeverify.model.router import Router, take_best

B, S, H = 3, 5, 16


def make_router(spec, dtype: torch.dtype = torch.float64, seed: int = 0) -> Router:
    router = Router(H, spec, {"dtype": dtype, "device": torch.device("cpu")})
    generator = torch.Generator().manual_seed(seed)
    for parameter in router.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) / 4).to(dtype)
    return router


def score(router: Router, x: torch.Tensor) -> torch.Tensor:
    """Return scores by their definition, without the router's code."""
    logits = torch.einsum("bsh,eh->bse", x, router.weight)
    if router.bias is not None:
        logits = logits + router.bias
    if router.spec.score == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    return torch.exp(logits) / torch.exp(logits).sum(dim=-1, keepdim=True)


def choose_by_definition(selection: list[float], spec) -> list[int]:
    size = spec.num_experts // spec.num_groups
    groups = [list(range(start, start + size)) for start in range(0, spec.num_experts, size)]

    def rate(group: list[int]) -> float:
        ranked = sorted((selection[expert] for expert in group), reverse=True)
        return ranked[0] if spec.group_score == "max" else ranked[0] + ranked[1]

    kept = sorted(groups, key=rate, reverse=True)[: spec.top_groups]
    return sorted((expert for group in kept for expert in group), key=lambda expert: -selection[expert])[
        : spec.top_k
    ]


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize("top_groups", [1, 2, 4])
@pytest.mark.parametrize("score_kind", ["softmax", "sigmoid"])
def test_choice_is_the_definition(make_moe, make_normal, group_score, top_groups, score_kind) -> None:
    spec = make_moe(score=score_kind, group_score=group_score, top_groups=top_groups, top_k=3, idle_experts=0)
    router, x = make_router(spec), make_normal(40, S, H)
    router.selection_bias.copy_(make_normal(12, seed=5) * 0.2)
    ids = router(x).ids
    selection = (score(router, x) + router.selection_bias).detach()
    for row in range(len(x)):
        for token in range(S):
            expected = choose_by_definition(selection[row, token].tolist(), spec)
            assert ids[row, token].tolist() == expected


def test_the_two_group_scores_choose_differently(make_moe, make_normal) -> None:
    x = make_normal(40, S, H)
    chosen = [
        make_router(make_moe(group_score=kind, top_groups=1))(x).ids.sort(dim=-1).values
        for kind in ("max", "top2_sum")
    ]
    assert not torch.equal(*chosen)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score_kind", ["softmax", "sigmoid"])
def test_combine_weights_are_the_chosen_scores(make_moe, make_normal, renormalize, score_kind) -> None:
    router, x = make_router(make_moe(score=score_kind, renormalize=renormalize)), make_normal(B, S, H)
    routing = router(x)
    expected = score(router, x).gather(-1, routing.ids)
    if renormalize:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(routing.weights, expected * 2.5, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("renormalize", [False, True])
def test_one_choice_does_not_mix_tokens(make_moe, make_normal, renormalize) -> None:
    router, x = make_router(make_moe(top_k=1, renormalize=renormalize)), make_normal(B, S, H)
    weights = router(x).weights
    assert weights.shape == (B, S, 1)
    alone = torch.cat([router(x[row : row + 1]).weights for row in range(B)])
    torch.testing.assert_close(weights, alone, rtol=1e-13, atol=1e-13)
    if renormalize:
        torch.testing.assert_close(weights, torch.full_like(weights, 2.5))


def test_all_experts_chosen(make_moe, make_normal) -> None:
    router = make_router(make_moe(top_k=12, num_groups=1, top_groups=1, idle_experts=0))
    routing = router(make_normal(B, S, H))
    assert torch.equal(routing.ids.sort(dim=-1).values, torch.arange(12).expand(B, S, 12))
    assert router.record.margin.isinf().all()
    assert torch.equal(routing.stats.counts, torch.full((B, 12), S))


def test_selection_bias_moves_ids_and_not_weights(make_moe, make_normal) -> None:
    router, x = make_router(make_moe(renormalize=False, num_groups=1, top_groups=1)), make_normal(B, S, H)
    before = router(x).ids
    router.selection_bias[7] = 10.0
    routing = router(x)
    assert (routing.ids[..., 0] == 7).all()
    assert not torch.equal(before, routing.ids)
    expected = score(router, x).gather(-1, routing.ids) * 2.5
    torch.testing.assert_close(routing.weights, expected, rtol=1e-13, atol=1e-13)
    total = score(router, x)
    torch.testing.assert_close(
        routing.stats.probability_sum,
        (total / total.sum(dim=-1, keepdim=True)).sum(dim=1),
        rtol=1e-13,
        atol=1e-13,
    )


def test_no_selection_bias_without_need(make_moe) -> None:
    assert make_router(make_moe(selection_bias_rate=0.0, idle_experts=0)).selection_bias is None
    assert make_router(make_moe(selection_bias_rate=1e-3, idle_experts=0)).selection_bias is not None
    assert make_router(make_moe(selection_bias_rate=0.0, idle_experts=1)).selection_bias is not None


def test_statistics_are_sums_over_valid_tokens(make_moe, make_normal) -> None:
    router, x = make_router(make_moe()), make_normal(B, S, H)
    valid = torch.arange(S) < torch.tensor([5, 2, 0]).unsqueeze(1)
    routing = router(x, valid)
    scores = score(router, x)
    probabilities = scores / scores.sum(dim=-1, keepdim=True)
    logits = torch.log(scores / (1 - scores))
    counts, z_sum = torch.zeros(B, 12, dtype=torch.int64), 0.0
    probability_sum = torch.zeros(B, 12, dtype=torch.float64)
    for row, token in valid.nonzero().tolist():
        probability_sum[row] += probabilities[row, token]
        z_sum = z_sum + torch.log(torch.exp(logits[row, token]).sum()) ** 2
        for expert in routing.ids[row, token].tolist():
            counts[row, expert] += 1
    stats = routing.stats
    torch.testing.assert_close(stats.probability_sum, probability_sum, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.z_sum, z_sum, rtol=1e-12, atol=1e-12)
    assert torch.equal(stats.counts, counts)
    assert torch.equal(router.record.counts, counts.sum(dim=0))
    assert stats.counts.dtype == torch.int64
    assert not stats.counts.requires_grad


def test_padding_is_routed_but_gives_no_gradient(make_moe, make_normal) -> None:
    router = make_router(make_moe())
    x = make_normal(B, S, H).requires_grad_()
    valid = torch.arange(S).expand(B, S) < 3
    routing = router(x, valid)
    assert torch.equal(routing.ids, router(x).ids)
    (routing.stats.z_sum + (routing.stats.probability_sum**2).sum()).backward()
    assert (x.grad[:, 3:] == 0).all()
    assert (x.grad[:, :3] != 0).all()


def test_replay_replaces_the_choice_and_gradients_follow(make_moe, make_normal) -> None:
    router, x = make_router(make_moe(renormalize=False)), make_normal(B, S, H)
    own = router(x)
    own_margin = router.record.margin
    router.replay = (own.ids + 1) % 12
    replayed = router(x)
    assert torch.equal(replayed.ids, router.replay)
    assert torch.equal(router.record.ids, own.ids)
    assert torch.equal(router.record.margin, own_margin)
    assert torch.equal(router.record.weights, replayed.weights)
    torch.testing.assert_close(replayed.weights, score(router, x).gather(-1, router.replay) * 2.5)
    expected_counts = torch.zeros(12, dtype=torch.int64)
    for expert in router.replay.flatten().tolist():
        expected_counts[expert] += 1
    assert torch.equal(router.record.counts, expected_counts)
    assert torch.equal(replayed.stats.counts.sum(dim=0), expected_counts)
    (actual,) = torch.autograd.grad(replayed.weights.square().sum(), router.weight)
    (expected,) = torch.autograd.grad(
        (score(router, x).gather(-1, router.replay) * 2.5).square().sum(), router.weight
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_margin_is_to_the_next_expert(make_moe, make_normal) -> None:
    router, x = make_router(make_moe(num_groups=1, top_groups=1, idle_experts=0)), make_normal(B, S, H)
    router.selection_bias.copy_(make_normal(12, seed=5) * 0.2)
    router(x)
    ranked = (score(router, x) + router.selection_bias).sort(dim=-1, descending=True).values
    torch.testing.assert_close(router.record.margin, ranked[..., 2] - ranked[..., 3], rtol=1e-10, atol=1e-13)


def test_margin_bounds_every_change_of_the_choice(make_moe, make_normal) -> None:
    # Any change of all scores by less than half the margin (a quarter for sums of two scores) keeps ids.
    router, x = make_router(make_moe(top_groups=2, idle_experts=0)), make_normal(60, S, H)
    ids, margin = router(x).ids, router.record.margin
    scores = score(router, x).detach()
    noise = make_normal(60, S, 12, seed=9).sign() * margin.unsqueeze(-1) * 0.249
    moved, _ = router._choose(scores + noise)
    assert torch.equal(moved, moved.clone())
    assert torch.equal(moved.sort(dim=-1).values, ids.sort(dim=-1).values)


def test_ties_go_to_the_lower_id() -> None:
    scores = torch.tensor([[0.5, 0.7, 0.5, 0.7, 0.5]]).repeat(1000, 1)
    ids, margin = take_best(scores, 3)
    assert torch.equal(ids, torch.tensor([1, 3, 0]).expand(1000, 3))
    assert (margin == 0).all()


@pytest.mark.parametrize("score_kind", ["softmax", "sigmoid"])
def test_bfloat16_is_routed_in_float32(make_moe, make_normal, score_kind) -> None:
    router = make_router(make_moe(score=score_kind), torch.bfloat16)
    x = make_normal(8, 16, H).to(torch.bfloat16)
    routing = router(x)
    assert routing.weights.dtype == torch.bfloat16
    assert routing.stats.z_sum.dtype == routing.stats.probability_sum.dtype == torch.float32
    assert router.selection_bias.dtype == torch.float32
    wide = make_router(make_moe(score=score_kind))
    wide.load_state_dict(router.state_dict())
    expected = wide(x.double())
    assert torch.equal(routing.ids, expected.ids)
    torch.testing.assert_close(routing.stats.z_sum.double(), expected.stats.z_sum, rtol=1e-5, atol=0)


def test_the_record_holds_no_graph(make_moe, make_normal) -> None:
    router = make_router(make_moe())
    assert router.record is None
    router(make_normal(B, S, H))
    assert not any(tensor.requires_grad for tensor in router.record)


def test_parameters_are_taken_through_the_view(make_moe, make_normal) -> None:
    router, x = make_router(make_moe()), make_normal(B, S, H)
    doubled = make_router(make_moe())
    for parameter in doubled.parameters():
        parameter.data *= 2
    router.view = lambda parameter: parameter * 2
    assert torch.equal(router(x).weights, doubled(x).weights)
