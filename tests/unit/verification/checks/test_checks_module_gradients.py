"""Choices that one device's module takes from a rank, and gradients that are summed again from calls."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moeverify.parallel.regions.region import Region
from moeverify.train.selections import HeldSelections, RecordedSelections, Selection
from moeverify.verification.checks.module_gradients import (
    StepSums,
    compare_sums,
    find_owners,
    hold,
    sum_calls,
)
from moeverify.verification.checks.module_replay import (
    KeptCalls,
    ModuleCall,
    choose_modules,
    mixes_positions,
    run,
)

WIDTH, ROWS, POSITIONS = 8, 4, 6
UNIT = torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.topk(2, dim=-1),
        lambda x: torch.topk(x, 2),
        lambda x: x.sort(descending=True),
        lambda x: torch.max(x, dim=1, keepdim=True),
        lambda x: x.kthvalue(2, dim=0),
        lambda x: x.argmax(-1),
        lambda x: x.argmax(),
    ],
)
@pytest.mark.parametrize("is_near", [True, False])
def test_a_choice_of_a_rank_is_held_if_rounding_allows_it(choose, is_near: bool) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    one = torch.ones(5, 6) + (1e-4 if is_near else 0.5) * torch.randn(5, 6)
    of_rank = one.flip(0).flip(1) if is_near else -one
    with RecordedSelections() as recorded:
        expected = choose(of_rank)
    with HeldSelections(recorded.made, UNIT):
        actual = choose(one)
    free = choose(one)
    assert torch.equal(_read_indices(actual), _read_indices(expected if is_near else free))
    if isinstance(actual, tuple):
        assert (actual.values - free.values).abs().max() < 1e-3


def _read_indices(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result[1] if isinstance(result, tuple) else result


def test_choices_of_another_module_are_not_held() -> None:
    x = torch.randn(3, 4)
    wrong = [
        Selection("topk", -1, torch.zeros(3, 1, dtype=torch.int64)),
        Selection("argmax", -1, x.argmin(-1)),
    ]
    with HeldSelections(wrong, 100.0):
        assert torch.equal(x.topk(2).indices, torch.topk(x, 2)[1])
        found = x.argmax(-1)
    assert torch.equal(found, x.argmax(-1)), "a sequence that differs is not followed further"


class Mixture(nn.Module):
    """An expert a token. Its scores are also an output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        weight, chosen = scores.softmax(-1).max(dim=-1, keepdim=True)
        return x + weight * torch.einsum("bsi,bsij->bsj", x, self.experts[chosen[..., 0]]), scores


def test_one_devices_module_takes_the_choices_of_the_rank() -> None:
    mixture = Mixture()
    with torch.no_grad():
        mixture.gate.weight[1], mixture.gate.bias[1] = mixture.gate.weight[0], mixture.gate.bias[0]  # a tie
    x = torch.randn(ROWS, POSITIONS, WIDTH)
    chosen = mixture.gate(x).argmax(-1, keepdim=True)
    assert (chosen == 0).any()
    call = ModuleCall((x,), {}, selections=(Selection("max", -1, torch.where(chosen == 0, 1, chosen)),))
    results, _ = run(mixture, call, nn.Identity(), UNIT)
    with torch.no_grad():
        mixture.experts[0] = mixture.experts[1]
    torch.testing.assert_close(results["output", "0"], mixture(x)[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Mixture()])
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.tokens.weight
        self.loose = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.loose
        for block in self.blocks:
            x, scores = block(x)
        return self.head(x).square().mean() + scores.square().mean()


def train_ranks(num_ranks: int = 2, num_calls: int = 2) -> tuple[list[StepSums], Model]:
    """Return each rank's part of a step in bfloat16, and the model whose gradients are the sum."""
    torch.manual_seed(0)
    one = Model().bfloat16()
    whole, found = copy.deepcopy(one), []
    for rank in range(num_ranks):
        own = copy.deepcopy(one)
        kept = KeptCalls(choose_modules(own))
        for _ in range(num_calls):
            own(torch.randint(16, (ROWS, POSITIONS))).backward()
        narrow, wide = copy.deepcopy(one), copy.deepcopy(one).double()
        modules = choose_modules(narrow)
        names = {id(each): name for name, each in narrow.named_parameters()}
        sums = StepSums(str(rank), owners=find_owners(narrow, modules))
        for name, calls in kept.take().items():
            inner = {path: names[id(each)] for path, each in modules[name].named_parameters()}
            wide_one = choose_modules(wide)[name]
            for parameter, added in sum_calls(
                calls, modules[name], wide_one, inner, (ROWS, POSITIONS), UNIT
            ).items():
                sums.added.setdefault(parameter, {})[name] = added
        kept.close()
        found.append(sums)
        for total, each in zip(whole.parameters(), own.parameters(), strict=True):
            total.grad = each.grad if total.grad is None else total.grad + each.grad
    return found, whole


def compare(of_ranks: list[StepSums], whole: Model) -> dict[str, bool]:
    """Return for each gradient that is summed again whether it differs."""
    for name, each in whole.named_parameters():
        assert each.grad is not None
        of_ranks[0].held[name] = [hold(each.grad, Region.whole(each.shape))]
    summed = compare_sums(of_ranks)
    assert all(each.rounding < 0.01 for each in summed.values())
    return {name: each.error > 8 * each.rounding for name, each in summed.items()}


def test_gradients_are_the_sums_over_calls_ranks_and_uses() -> None:
    of_ranks, whole = train_ranks()
    # `loose` is in no module that is replayed.
    expected = ["blocks.0.experts", "blocks.0.gate.bias", "blocks.0.gate.weight", "tokens.weight"]
    assert compare(of_ranks, whole) == dict.fromkeys(expected, False)
    whole.blocks[0].experts.grad *= 1.2  # type: ignore[operator]
    assert [name for name, differs in compare(of_ranks, whole).items() if differs] == ["blocks.0.experts"]


def test_a_part_of_the_batch_counts_once_and_all_parts_must_be_known() -> None:
    of_ranks, whole = train_ranks()
    same = [of_ranks[0], replace(of_ranks[1], added={}), replace(of_ranks[1], held={})]
    assert not any(compare(same, whole).values()), "the third rank has the batch of the second"
    assert compare([of_ranks[0], replace(of_ranks[1], added={})], whole) == {}
    for each in of_ranks:  # a member that could not be replayed stands back for the module around it
        each.added["blocks.0.gate.weight"].pop("blocks.0.gate")
    assert compare(of_ranks, whole)["blocks.0.gate.weight"] is False


def test_a_users_own_scale_is_a_number_of_ranks() -> None:
    of_ranks, whole = train_ranks()
    for each in whole.parameters():
        each.grad = None if each.grad is None else each.grad / 2.0
    scaled = [replace(each, is_scaled=True) for each in of_ranks]
    assert all(compare(of_ranks, whole).values())
    assert not any(compare(scaled, whole).values())
    whole.blocks[0].experts.grad *= 1.2  # type: ignore[operator]
    assert [name for name, differs in compare(scaled, whole).items() if differs] == ["blocks.0.experts"]


class Before(nn.Module):
    """Adds the position before, as causal attention depends on it."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.weight = shift, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + nn.functional.pad(x, (0, 0, self.shift, -self.shift))


@pytest.mark.parametrize(
    ("module", "is_flat", "mixes"),
    [
        (nn.Linear(WIDTH, WIDTH), False, False),
        (nn.Linear(WIDTH, WIDTH), True, False),
        (Before(1), False, True),
        (Before(-1), False, True),
    ],
)
def test_modules_that_mix_positions_are_known(module: nn.Module, is_flat: bool, mixes: bool) -> None:
    module = module.bfloat16()
    kept = KeptCalls({"one": module})
    x = torch.randn(ROWS, POSITIONS, WIDTH).bfloat16()
    module(x.flatten(0, 1) if is_flat else x)
    kept.close()
    assert mixes_positions(kept.found["one"][0], module, (ROWS, POSITIONS), UNIT) is mixes
