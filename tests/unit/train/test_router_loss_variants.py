"""Variants of the balance loss, beside what a router of another recipe hands over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.faults.setting import make_case
from moeverify.model.router import Router, RouterStats
from moeverify.results.change import Change
from moeverify.train.router_loss_variants import list_variants, vary

GROUPED = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "top_k": 3}


def make_router(**changes: Any) -> Router:
    """Return a router of 8 experts whose weights and selection bias are those of every other one."""
    moe = make_case("variants", moe={"num_experts": 8, "idle_experts": 0, **changes}).recipe.model.moe
    assert moe is not None
    router = Router(6, moe, {"dtype": torch.float64, "device": torch.device("cpu")})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for values in (*router.parameters(), *router.buffers()):
            size = 0.2 if values is router.selection_bias else 1.0
            values.copy_(size * torch.randn(values.shape, generator=generator, dtype=torch.float64))
    return router


def draw_input() -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, 7:] = False
    return x, valid


def run_variant(router: Router, *changes: tuple[str, str]) -> RouterStats:
    x, valid = draw_input()
    with vary(router, [Change(part=part, way=way) for part, way in changes]):
        stats: RouterStats = router(x, valid).stats
    return stats


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        ("without-groups", {"top_groups": 4}),
        ("without-bias", {"selection_bias_rate": 0.0}),
        ("plain", {"top_groups": 4, "selection_bias_rate": 0.0}),
    ],
)
def test_counts_of_another_choice_are_those_of_a_router_that_chooses_so(way: str, changes: Any) -> None:
    right = make_router(**GROUPED, selection_bias_rate=0.1)
    x, valid = draw_input()
    expected = make_router(**{**GROUPED, "selection_bias_rate": 0.1, **changes})(x, valid).stats
    found = run_variant(right, ("counts", way))
    assert torch.equal(found.counts, expected.counts)
    assert not torch.equal(found.counts, right(x, valid).stats.counts)
    torch.testing.assert_close(found.probability_sum, expected.probability_sum)


@pytest.mark.parametrize(
    ("score", "other", "way"), [("sigmoid", "softmax", "softmax"), ("softmax", "sigmoid", "sigmoid")]
)
def test_probabilities_of_the_other_score(score: str, other: str, way: str) -> None:
    x, valid = draw_input()
    found = run_variant(make_router(score=score), ("probabilities", way))
    expected = make_router(score=other)(x, valid).stats
    torch.testing.assert_close(found.probability_sum, expected.probability_sum)


def test_the_first_choice_alone_and_padding_change_the_counts_alone() -> None:
    router = make_router(**GROUPED)
    x, valid = draw_input()
    right = router(x, valid).stats
    first, padded = run_variant(router, ("counts", "first")), run_variant(router, ("counts", "padded"))
    assert int(first.counts.sum()) == int(valid.sum())
    assert int(padded.counts.sum()) == 3 * valid.numel()
    for each in (first, padded):
        torch.testing.assert_close(each.probability_sum, right.probability_sum)


def test_probabilities_of_the_chosen_experts_sum_to_one_where_they_are_divided() -> None:
    router = make_router(score="softmax")
    _, valid = draw_input()
    stats = run_variant(router, ("probabilities", "chosen-normalized"), ("counts", "first"))
    assert float(stats.probability_sum.detach().sum()) == pytest.approx(float(valid.sum()))


@pytest.mark.parametrize(
    ("score", "way", "other"),
    [("sigmoid", "chosen-softmax", "softmax"), ("softmax", "chosen-sigmoid", "sigmoid")],
)
def test_the_other_score_of_the_chosen_logits_is_that_of_another_router(
    score: str, way: str, other: str
) -> None:
    router, choosing = make_router(score=score), make_router(score=other)
    choosing.spec = choosing.spec.model_copy(update={"renormalize": True, "route_scale": 1.0})
    x, valid = draw_input()
    ids = router(x, valid).ids
    choosing.replay = ids
    stats = run_variant(router, ("probabilities", way))
    weights = choosing(x, valid).weights * valid.unsqueeze(-1)
    expected = torch.zeros(*ids.shape[:-1], 8, dtype=torch.float64).scatter(-1, ids, weights).sum(dim=1)
    torch.testing.assert_close(stats.probability_sum, expected)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_no_variant_is_the_right_one_or_another_variant(score: str) -> None:
    router = make_router(**{**GROUPED, "score": score}, selection_bias_rate=0.1)
    assert router.spec is not None
    x, valid = draw_input()
    seen = [router(x, valid).stats]
    for number in (1, 2):
        for changes in list_variants(router.spec, "balance", number):
            with vary(router, changes):
                seen.append(router(x, valid).stats)
    keys = {
        (each.counts.requires_grad, *each.counts.flatten().tolist(), *each.probability_sum.flatten().tolist())
        for each in seen
    }
    assert len(keys) == len(seen)


def test_no_variant_of_the_z_loss_is_the_right_one_or_another_one() -> None:
    router = make_router(score="sigmoid")
    x, valid = draw_input()
    found = [float(router(x, valid).stats.z_sum.detach())]
    for changes in list_variants(router.spec, "z", 1):
        with vary(router, changes):
            found.append(float(router(x, valid).stats.z_sum.detach()))
    assert len({round(each, 9) for each in found}) == len(found) > 5
    assert not list(list_variants(router.spec, "z", 2))


def test_probabilities_that_stand_for_counts_sum_to_as_many() -> None:
    router = make_router(score="softmax", top_k=3)
    _, valid = draw_input()
    stats = run_variant(router, ("counts", "detached-probabilities"))
    assert float(stats.counts.sum()) == pytest.approx(3.0 * float(valid.sum()))
    assert not stats.counts.requires_grad
    assert run_variant(router, ("counts", "probabilities")).counts.requires_grad
