"""Replays of routed experts: exchanges of token copies, slices of experts, and what comes back through both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from replays import CALL, EXPERTS, LENGTH, ROWS, make_model, name_changes, read_right
from torch import Tensor
from wrong_tensors import make_tensor

from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.experts import ExpertsFormula
from moeverify.diagnose.replay.experts_gradient import CombineGradientFormula, ExpertsGradientFormula
from moeverify.diagnose.replay.formulas import RightModules, make_formula
from moeverify.diagnose.replay.language import Formula, Found, find_variant
from moeverify.diagnose.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.layout.region import Region

Rows = list[tuple[int, int]]  # copy, expert
Steps = dict[str, Callable[[Rows], Rows]]
_REVERSED: Callable[[Rows], Rows] = lambda rows: rows[::-1]  # noqa: E731
_BACK_TO_FRONT = ("sent", "arrived", "sorted", "computed", "unsorted", "returned")


@cache
def make_experts() -> ExpertsFormula:
    model, right = make_model("stress"), read_right("stress")
    modules = RightModules(model, right, Chunks([range(LENGTH)]), None, EXPERTS)
    came_in = modules.read("layers.1.moe.dispatcher", "input")
    assert came_in is not None
    origin = Origin("forward", "layers.1.moe.dispatcher", "output", 1.0, (0,), make_tensor(came_in))
    named = make_formula(origin, modules)
    assert named is not None
    assert isinstance(named.formula, ExpertsFormula)
    return named.formula


def make_gradient() -> Tensor:
    experts = make_experts()
    return torch.randn(experts.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def run_expert(x: Tensor, expert: int, units: Tensor | None = None) -> Tensor:
    """Return one expert's output, written out once more."""
    held = make_experts().held
    assert held.gate_bias is not None
    assert held.up_bias is not None
    assert held.down_bias is not None
    gate = held.gate[expert] @ x + held.gate_bias[expert]
    inside = torch.nn.functional.silu(gate) * (held.up[expert] @ x + held.up_bias[expert])
    inside = inside if units is None else inside * units
    return held.down[expert] @ inside + held.down_bias[expert]


@torch.no_grad()
def travel(steps: Steps) -> Tensor:
    """Return what two ranks, with half of the experts and one row each, combine, where buffers may be mixed."""
    experts = make_experts()
    ids, weights = experts.ids.flatten(0, 1), experts.weights.flatten(0, 1)
    x, half, k = experts.x.flatten(0, 1), experts.count // 2, experts.num_choices
    pass_on: Callable[[Rows], Rows] = lambda rows: rows  # noqa: E731
    mix = {name: steps.get(name, pass_on) for name in _BACK_TO_FRONT}
    wanted: list[Rows] = []
    for tokens in CALL:
        copies = [(int(t) * k + c, int(ids[t, c])) for t in tokens for c in range(k)]
        wanted.append(sorted(copies, key=lambda row: row[1]))
    sent = [mix["sent"](rows) for rows in wanted]
    returned: list[Rows] = [[], []]
    for rank in range(2):
        sizes = [[expert // half for _, expert in rows].count(rank) for rows in wanted]
        starts = [0 if rank == 0 else len(rows) - size for rows, size in zip(sent, sizes, strict=True)]
        arrived = [
            row
            for rows, start, size in zip(sent, starts, sizes, strict=True)
            for row in rows[start : start + size]
        ]
        slots = [
            row[1] for rows in wanted for row in rows if row[1] // half == rank
        ]  # the expert of each place
        order = sorted(range(len(slots)), key=lambda place: slots[place])
        arrived = mix["arrived"](arrived)
        there = mix["sorted"]([arrived[place] for place in order])
        computed = [(copy, slots[place]) for (copy, _), place in zip(there, order, strict=True)]
        back: Rows = [(-1, -1)] * len(order)
        for row, place in zip(mix["computed"](computed), order, strict=True):
            back[place] = row
        back = mix["unsorted"](back)
        for source in range(len(sizes)):
            returned[source] += back[sum(sizes[:source]) : sum(sizes[: source + 1])]
    out = torch.zeros_like(x)
    for rows, places in zip(returned, wanted, strict=True):
        for (copy, expert), (place, _) in zip(mix["returned"](rows), places, strict=True):
            value = run_expert(x[copy // k], expert)
            out[place // k] += weights[place // k, place % k] * value
    return out.view_as(experts.x)


def explain(formula: Formula, expected: Tensor, actual: Tensor, direction: str = "forward") -> Found | None:
    """Return the variant that two ranks with a row each compute."""
    shards = []
    for rank in range(ROWS):
        region = Region.box(expected.shape, ((rank,), *map(range, expected.shape[1:])))
        shards.append(RankShard(rank, region, actual[rank : rank + 1]))
    tensor = WrongTensor((0, MODULE_KINDS[direction], "moe"), expected, tuple(shards))
    return find_variant(formula, tensor, 1e-9)


def test_the_written_out_exchange_is_the_golden() -> None:
    right = make_experts().list_outputs() * make_experts().weights.unsqueeze(-1)
    assert torch.allclose(travel({}), right.sum(2), atol=1e-12)


@pytest.mark.parametrize("buffer", _BACK_TO_FRONT)
@pytest.mark.parametrize(
    ("mix", "way"),
    [
        (_REVERSED, "reversed"),
        (lambda rows: rows[-1:] + rows[:-1], "rolled"),
        (lambda rows: [rows[n % 8] for n in range(len(rows))], "modulo"),
    ],
)
def test_rows_of_a_buffer_that_stand_elsewhere(buffer: str, mix: Callable[[Rows], Rows], way: str) -> None:
    experts = make_experts()
    found = explain(experts, travel({}), travel({buffer: mix}))
    names = name_changes(found)
    assert names
    assert [(buffer, way)] in names


def test_experts_that_are_given_other_counts() -> None:
    experts = make_experts()
    expected, ids, x = travel({}), experts.ids, experts.x
    half = experts.count // 2
    wrong = torch.zeros_like(expected)
    copies = [(token, choice) for token in range(ROWS * LENGTH) for choice in range(experts.num_choices)]
    for rank in range(2):
        flat = ids.flatten(0, 1)
        here = sorted((int(flat[t, c]), t, c) for t, c in copies if int(flat[t, c]) // half == rank)
        counts = [sum(expert == rank * half + n for expert, _, _ in here) for n in range(half)]
        # The counts of the experts in reverse order: rows stay where they are.
        owners = [rank * half + n for n, count in enumerate(counts[::-1]) for _ in range(count)]
        for owner, (_, token, choice) in zip(owners, here, strict=True):
            row, position = divmod(token, LENGTH)
            value = run_expert(x[row, position], owner).detach()
            wrong[row, position] += experts.weights[row, position, choice].detach() * value
    assert [("counts", "reversed")] in (name_changes(explain(experts, expected, wrong)) or [])


@pytest.mark.parametrize(
    ("is_left_out", "way"),
    [(lambda ids, half: ids == 1, "without-expert"), (lambda ids, half: ids % half == 1, "without-local")],
)
def test_experts_whose_outputs_are_lost(is_left_out: Callable[[Tensor, int], Tensor], way: str) -> None:
    experts = make_experts()
    values = experts.list_outputs() * experts.weights.unsqueeze(-1)
    lost = is_left_out(experts.ids, experts.count // 2).unsqueeze(-1)
    found = explain(experts, values.sum(2).detach(), values.masked_fill(lost, 0.0).sum(2).detach())
    assert name_changes(found) == [[("choices", way)]]


def list_values(units: Tensor) -> Tensor:
    """Return the output of each choice (B, S, k, H) of some hidden units; the first of two slices adds the bias."""
    experts = make_experts()
    held = experts.held
    assert held.down_bias is not None
    values = torch.stack(
        [
            torch.stack(
                [
                    run_expert(x, int(expert), units) - (0.0 if units[0] else held.down_bias[int(expert)])
                    for expert in ids
                ]
            )
            for x, ids in zip(experts.x.flatten(0, 1), experts.ids.flatten(0, 1), strict=True)
        ]
    )
    return values.detach().view(*experts.ids.shape, -1)


@cache
def list_slices() -> tuple[Tensor, Tensor]:
    """Return the outputs of the choices by the first half of the hidden units, and by the second."""
    width = make_experts().held.gate.shape[1]
    first = (torch.arange(width) < width // 2).double()
    return list_values(first), list_values(1.0 - first)


def test_slices_of_experts_that_are_not_summed() -> None:
    experts = make_experts()
    weights = experts.weights.detach().unsqueeze(-1)
    first, second = ((each * weights).sum(2) for each in list_slices())
    expected = first + second
    own = torch.stack([first[0], second[1]])
    assert name_changes(explain(experts, expected, own)) == [[("slices", "own")]]
    assert name_changes(explain(experts, expected, first)) == [[("slices", "without")]]
    assert name_changes(explain(experts, expected, 2.0 * first)) == [[("slices", "of")]]


def test_tokens_that_alone_lack_something_are_counted() -> None:
    experts = make_experts()
    weights = experts.weights.detach().unsqueeze(-1)
    first, second = ((each * weights).sum(2) for each in list_slices())
    expected, actual = first + second, first + second
    actual[:, 5:] = first[:, 5:]
    found = explain(experts, expected, actual)
    assert name_changes(found) == [[("slices", "without")]]
    assert found is not None
    assert found.tokens == (6, 16)


def test_one_slice_of_experts_that_drops_what_the_other_keeps() -> None:
    experts = make_experts()
    weights = experts.weights.detach().unsqueeze(-1)
    first, second = (each * weights for each in list_slices())
    kept = torch.ones(ROWS, LENGTH, experts.num_choices, 1, dtype=torch.float64)
    kept[:, :, -1] = 0.0
    found = explain(experts, (first + second).sum(2), (first + second * kept).sum(2))
    assert name_changes(found) == [[("choices", "without"), ("where", "slice")]]


def test_what_comes_back_to_combine_weights() -> None:
    experts, gradient = make_experts(), make_gradient()
    formula = CombineGradientFormula(experts, gradient)
    first, second = ((each * gradient.unsqueeze(2)).sum(-1) for each in list_slices())
    own = torch.stack([first[0], second[1]])
    expected = first + second
    assert name_changes(explain(formula, expected, own, "backward")) == [[("slices", "own")]]
    here = experts.ids // (experts.count // 2) == torch.arange(ROWS).view(ROWS, 1, 1)
    assert name_changes(explain(formula, expected, expected * here, "backward")) == [
        [("choices", "own-rank")]
    ]
    assert name_changes(explain(formula, expected, expected + expected.abs(), "backward")) == []


def test_rows_of_gradients_that_stand_elsewhere() -> None:
    experts, gradient = make_experts(), make_gradient()
    formula = ExpertsGradientFormula(experts, gradient)
    k = experts.num_choices
    given = (experts.weights.detach().unsqueeze(-1) * gradient.unsqueeze(2)).flatten(0, 2)

    def pull_back(back: Tensor, out: Tensor) -> Tensor:
        """Return the gradient of tokens where copies get that of others, and give theirs to others."""
        rows = experts.x.repeat_interleave(k, 1).flatten(0, 1).clone().requires_grad_()
        values = [run_expert(row, int(e)) for row, e in zip(rows, experts.ids.flatten(), strict=True)]
        (passed,) = torch.autograd.grad(torch.stack(values), rows, given[back])
        whole = torch.zeros_like(experts.x).flatten(0, 1)
        return whole.index_add(0, out // k, passed).view_as(experts.x)

    same = torch.arange(experts.ids.numel())
    # Each rank's copies by expert, and these in reverse order.
    orders = [row.flatten().sort(stable=True).indices + n * LENGTH * k for n, row in enumerate(experts.ids)]
    turned = same.clone()
    for order in orders:
        turned[order] = order.flip(0)
    expected = pull_back(same, same)
    for found, buffer in ((pull_back(turned, same), "returned"), (pull_back(same, turned), "sent")):
        assert [(buffer, "reversed")] in (name_changes(explain(formula, expected, found, "backward")) or [])
