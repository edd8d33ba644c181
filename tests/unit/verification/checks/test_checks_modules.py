"""Modules of a user's model on the inputs of a rank, beside those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.report.words.check import word_check
from moeverify.verification.checks.module_replay import (
    KeptCalls,
    Obstacle,
    Replayed,
    _compare,
    choose_modules,
    replay,
)
from moeverify.verification.checks.modules import ModuleAgreement, ModuleReport

ROWS, POSITIONS, WIDTH = 2, 8, 16


class Scale(torch.autograd.Function):
    """The identity; its gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.factor * gradient, None


class Block(nn.Module):
    """Two parallel branches on one input, and a router that takes one expert a token."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.factor, self.back = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1, keepdim=True)
        y = torch.where(chosen == 0, self.one(x), self.two(x))
        return x + self.factor * Scale.apply(torch.tanh(y), self.back)


def make_model() -> nn.Sequential:
    """Return a model whose second module is a block."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())


def run_rank(change: Callable[[Block], object] = lambda block: None) -> list[Replayed]:
    """Return the replayed block of a model in bfloat16, changed on the rank."""
    one = make_model()
    model = copy.deepcopy(one).bfloat16()
    change(model[1])
    x = torch.randn(ROWS, POSITIONS, WIDTH).bfloat16()
    kept = KeptCalls({"1": model[1]})
    output = model(x)
    (output * torch.randn(output.shape)).sum().backward()
    kept.close()
    wide = copy.deepcopy(one).bfloat16().double()
    unit = torch.finfo(torch.bfloat16).eps
    return replay("1", kept.found["1"][0], one.bfloat16()[1], wide[1], (ROWS, POSITIONS), unit)


def errors(found: list[Replayed]) -> dict[str, bool]:
    """Return by end whether the error is beyond eight times the rounding of one device."""
    assert all(0.0 < each.rounding < 0.02 for each in found)
    return {each.end: each.error > 8 * each.rounding for each in found}


def test_a_module_that_computes_what_one_device_does_has_the_rounding_of_one_module() -> None:
    assert errors(run_rank()) == {"output": False, "gradient of its input": False}


def test_an_error_is_seen_at_the_end_that_has_it() -> None:
    def scale(block: Block) -> None:
        block.factor = 0.8

    def scale_back(block: Block) -> None:
        block.back = 0.5

    assert errors(run_rank(scale))["output"]
    assert errors(run_rank(scale_back)) == {"output": False, "gradient of its input": True}


def test_tokens_whose_choice_rounding_may_flip_do_not_count() -> None:
    tokens = (2, 8)
    exact = torch.randn(*tokens, WIDTH, dtype=torch.float64)
    same, nudged, actual = (exact * (1 + 0.002 * torch.randn_like(exact)) for _ in range(3))
    nudged[0, 0] = -exact[0, 0]  # another expert
    for choice in (1.0, -1.0, 5.0):
        actual[0, 0] = choice * exact[0, 0]
        compared = _compare(actual, (same, nudged), exact, tokens)
        assert compared is not None
        assert max(compared) < 0.004
    actual[1, 1] = -exact[1, 1]
    assert _compare(actual, (same, nudged), exact, tokens)[0] > 0.1  # type: ignore[index]
    nudged[0] = -exact[0]
    assert _compare(actual, (same, nudged), exact, tokens) is None, "half of the tokens"
    assert _compare(actual, (same, -exact), exact, tokens) is None, "all of them"


def test_watching_changes_no_bit_of_a_gradient() -> None:
    plain, watched = make_model().bfloat16(), make_model().bfloat16()
    x = torch.randn(ROWS, POSITIONS, WIDTH).bfloat16()
    kept = KeptCalls(choose_modules(watched))
    for model in (plain, watched):
        model(x).square().sum().backward()
    assert kept.found.keys() == {"0", "1", "1.one", "1.two", "1.router"}
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs if one.grad is not None)


def test_modules_with_buffers_alone_are_chosen_and_others_without_state_are_not() -> None:
    rotary = nn.Module()
    rotary.register_buffer("inv_freq", torch.ones(4), persistent=False)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
    model = nn.ModuleDict({"rotary": rotary, "act": nn.ReLU(), "blocks": blocks})
    assert choose_modules(model).keys() == {"rotary", "blocks.0", "blocks.0.0"}


def test_the_gradient_of_a_shared_input_is_that_of_each_user() -> None:
    model = make_model().double()
    kept = KeptCalls(choose_modules(model))
    model(torch.randn(ROWS, POSITIONS, WIDTH).double()).sum().backward()
    one = kept.found["1.one"][0]
    expected = one.of_outputs["0"] @ model[1].one.weight
    torch.testing.assert_close(one.of_inputs["0.0"], expected.detach())
    whole = kept.found["1"][0].of_inputs["0.0"]
    assert not torch.allclose(whole, one.of_inputs["0.0"])


def test_an_input_that_is_made_of_another_one_keeps_its_gradient_apart() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

    product = Product()
    kept = KeptCalls({"product": product})
    x = torch.randn(ROWS, POSITIONS, WIDTH, requires_grad=True) * 2.0
    y = 3.0 * x
    product(x, y).sum().backward()
    found = kept.found["product"][0].of_inputs
    torch.testing.assert_close(found["0.0"], y.detach().double())
    torch.testing.assert_close(found["0.1"], x.detach().double())


def test_modules_that_are_divided_are_left_out_with_a_reason() -> None:
    def halve(block: Block) -> None:
        block.forward = lambda x: x[..., : WIDTH // 2] * 2  # type: ignore[method-assign]

    with pytest.raises(Obstacle, match="divided inside"):
        run_rank(halve)


def test_an_error_in_a_block_follows_the_one_in_its_member_and_reasons_are_listed(
    run_ranks: Callable,
) -> None:
    shown = run_ranks({0: {"dp_shard": 0}, 1: {"dp_shard": 1}}).shown
    right = [Replayed("head", "output", 0.002, 0.002)]
    wrong = [Replayed("blocks.0", "output", 0.5, 0.004), Replayed("blocks.0.mlp", "output", 0.9, 0.004)]
    left_out = {"moe": "makes choices that rounding flips", "drop": ""}
    reports = [ModuleReport(tuple(right)), ModuleReport((*right, *wrong), left_out)]
    outcome = ModuleAgreement().judge(shown(), reports)
    assert outcome is not None
    assert [(each.tensor, each.follows, each.ranks) for each in outcome.findings] == [
        ("blocks.0 output", "blocks.0.mlp output", (1,)),
        ("blocks.0.mlp output", "", (1,)),
    ]
    assert outcome.findings[1].place is not None
    assert outcome.findings[1].place.module == "blocks.0.mlp"
    assert word_check(outcome.result).unseen == (
        "2 of 5 modules were not computed again: drop is not reproduced on one device either; "
        "moe makes choices that rounding flips"
    )
    assert ModuleAgreement().judge(shown(), [ModuleReport(tuple(right))]).findings == ()  # type: ignore[union-attr]
