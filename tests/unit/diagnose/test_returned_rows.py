"""Rows that experts return in the place of others, told from the sums of tokens alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from wrong_tensors import make_tensor

from moeverify.case.presets import PRESETS
from moeverify.case.schema import ReferenceModel
from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.right_modules import RightModules
from moeverify.diagnose.routed.experts import RoutedExperts
from moeverify.diagnose.routed.returned_rows import LOST, ExpertRows, RowFinder
from moeverify.model.init import initialize
from moeverify.model.transformer import Transformer
from moeverify.train.module_taps import Tap

Rows = dict[tuple[int, int], tuple[int, int]]  # (token, choice): (token, expert)

ROWS, LENGTH, BLOCK = 2, 8, "layers.1.moe"


@cache
def make_modules() -> RightModules:
    spec = ReferenceModel(**{**PRESETS["stress"], "num_layers": 2})
    model = Transformer(spec)
    initialize(model, spec, 0)
    tap = Tap(model, ROWS, LENGTH, scale=1.0, limit=1 << 30)
    with tap.reading(), torch.no_grad():
        model(torch.randint(0, 90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)))
    calls = [(torch.arange(LENGTH), torch.arange(LENGTH, ROWS * LENGTH))]
    return RightModules(model, tap.readings, None, calls)


def find_experts(culprit: str, direction: str = "forward") -> RoutedExperts | None:
    tensor = make_tensor(torch.ones(ROWS, LENGTH, 4))
    return make_modules().find_experts(Origin(direction, culprit, "output", 1.0, (0,), tensor))


@cache
def make_experts() -> RoutedExperts:
    found = find_experts(f"{BLOCK}.dispatcher")
    assert found is not None
    return found


def run_expert(x: Tensor, expert: int) -> Tensor:
    """Return one expert's output, written out once more."""
    held = make_experts().held
    assert held.gate_bias is not None
    assert held.up_bias is not None
    assert held.down_bias is not None
    gate = held.gate[expert] @ x + held.gate_bias[expert]
    inside = torch.nn.functional.silu(gate) * (held.up[expert] @ x + held.up_bias[expert])
    return held.down[expert] @ inside + held.down_bias[expert]


def test_experts_are_found_where_their_sum_is_wrong() -> None:
    experts = make_experts()
    assert experts.count == len(experts.held.gate)
    assert len(experts.calls) == 1
    assert find_experts(BLOCK) is None
    assert find_experts(f"{BLOCK}.dispatcher", "backward") is None
    assert find_experts("layers.0.mlp") is None
    right = make_modules().read(f"{BLOCK}.dispatcher", "output")
    rows = experts.compute_rows()[torch.arange(len(experts.x)).unsqueeze(1), experts.ids]
    assert right is not None
    assert torch.allclose((rows * experts.weights.unsqueeze(-1)).sum(1), right.flatten(0, 1), atol=1e-12)


@torch.no_grad()
def combine(other: Rows) -> tuple[Tensor, Tensor]:
    """Return what tokens should be, and what they are with the rows of others."""
    experts = make_experts()
    x, ids, weights = experts.x, experts.ids, experts.weights

    def run(changed: Rows) -> Tensor:
        out = torch.zeros_like(x)
        for token, choice in [(t, c) for t in range(len(x)) for c in range(ids.shape[1])]:
            source, expert = changed.get((token, choice), (token, int(ids[token, choice])))
            if source != LOST:
                out[token] += weights[token, choice] * run_expert(x[source], expert)
        return out

    return run({}), run(other)


def find(other: Rows) -> Rows | None:
    experts = make_experts()
    expected, actual = combine(other)
    found = ExpertRows(experts).find(actual, expected, 1e-9)
    if found is None:
        return None
    ids = experts.ids
    return {
        (t, c): (int(found.tokens[t, c]), int(found.experts[t, c]))
        for t in range(len(ids))
        for c in range(ids.shape[1])
        if (int(found.tokens[t, c]), int(found.experts[t, c])) != (t, int(ids[t, c]))
    }


def other_expert(token: int, choice: int) -> int:
    ids = make_experts().ids
    return next(expert for expert in range(make_experts().count) if expert not in ids[token].tolist())


@pytest.mark.parametrize(
    "rows",
    [
        {(0, 1): (LOST, LOST)},
        {(0, 1): (0, other_expert(0, 1)), (3, 0): (3, other_expert(3, 0))},
        {(2, 0): (5, 1)},
        {(2, 0): (5, 1), (2, 1): (7, 0)},
        {(4, 0): (LOST, LOST), (4, 1): (6, 1)},
        {(4, 0): (LOST, LOST), (4, 1): (LOST, LOST), (4, 2): (LOST, LOST)},
        {(token, choice): (LOST, LOST) for token in range(6) for choice in range(3) if token or choice},
    ],
)
def test_rows_of_other_tokens_and_experts_are_found(rows: Rows) -> None:
    assert find(rows) == rows


def test_outputs_that_are_no_sum_of_rows_are_not_explained() -> None:
    expected, actual = combine({(0, 1): (LOST, LOST)})
    actual[3] *= 1.001
    assert ExpertRows(make_experts()).find(actual, expected, 1e-9) is None
    assert ExpertRows(make_experts()).find(expected, expected, 1e-9) is None


def test_all_three_choices_of_a_token_may_be_others() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 8, dtype=torch.float64, generator=generator)
    weights = torch.rand(10, 3, dtype=torch.float64, generator=generator) + 0.1
    own = torch.arange(30).view(10, 3)
    taken = own.clone()
    taken[4] = torch.tensor([20, 7, 1])

    def combine_all(which: Tensor) -> Tensor:
        return (rows[which] * weights.unsqueeze(-1)).sum(1)

    finder = RowFinder(rows, own, weights, lambda token, choice: torch.arange(30))
    found = finder.find(combine_all(taken), combine_all(own), 1e-9)
    assert found is not None
    assert torch.equal(found, taken)
    assert RowFinder(rows, own, weights).find(combine_all(taken), combine_all(own), 1e-9) is None
