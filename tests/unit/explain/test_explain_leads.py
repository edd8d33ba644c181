"""Lines that scale the loss, change the order of elements, or detach a tensor, before a wrong result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recordings import list_ops, make, record_call
from torch import Tensor

from moeverify.explain.chains import takes_pair
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Joint
from moeverify.explain.program import Site
from moeverify.explain.upstream import Upstream
from moeverify.explain.user_lines import make_origin

WEIGHT = make(4, 4, seed=3)


def list_leads(run: Callable[[Tensor, int], Tensor], *, proves: bool = False) -> list[tuple[str, str]]:
    """Return (kind, expression) of the lines before the first wrong operations."""
    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    explainer = Explainer([ranks], one, 0, (2.0,))
    causes = explainer.explain(20, proves=proves)
    assert causes
    upstream = Upstream(explainer)
    return [(each.kind, each.line.expression) for cause in causes for each in upstream.find(cause)]


def backward(value: Tensor, leaf: Tensor) -> Tensor:
    value.backward()
    assert leaf.grad is not None
    return leaf.grad


def test_a_result_that_autograd_saves_is_no_detached_tensor() -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        hidden = leaf @ WEIGHT
        weights = hidden.softmax(-1) if on_ranks else hidden.exp() / hidden.exp().sum(-1, keepdim=True)
        return backward((weights * hidden).square().sum() * (1.0 if on_ranks else 0.5), leaf)

    assert not [each for each in list_leads(run) if each[0] == "cut"]


def test_a_factor_of_the_loss_that_ranks_alone_compute_is_named() -> None:
    def choose(valid: Tensor, on_ranks: int) -> Tensor | float:
        if on_ranks:
            return 0.4 * (valid / valid)
        return 0.2

    def run(x: Tensor, on_ranks: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        return backward((leaf.exp() @ WEIGHT).tanh().sum() * choose((x > 0).double().sum(), on_ranks), leaf)

    assert ("extra", "0.4 * (valid / valid)") in list_leads(run)


def test_the_number_that_scales_the_loss_is_named_with_its_definition() -> None:
    def choose_number(count: int, on_ranks: int) -> float:
        if on_ranks:
            return 4 / (count + 2)
        return 0.2

    def run(x: Tensor, on_ranks: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        return backward((leaf.exp() @ WEIGHT).tanh().sum() * choose_number(len(x), on_ranks), leaf)

    assert ("definition", "4 / (count + 2)") in list_leads(run)


def test_a_number_without_a_place_on_one_device_is_not_compared() -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        scaled = leaf * 2.0 * 2.0 if on_ranks else leaf * 4.0
        return backward((scaled.exp() @ WEIGHT).tanh().sum() * (1.0 if on_ranks else 0.5), leaf)

    numbers = [expression for kind, expression in list_leads(run) if kind == "number"]
    assert not [each for each in numbers if "2.0" in each]


def test_a_collective_is_shown_with_the_calls_around_it() -> None:
    stack = [Site(__file__, line, "run") for line in range(1, 6)]
    assert [each.line for each in make_origin("missing", stack).outer] == [3, 4]
    assert make_origin("branch", stack).outer == ()


def test_a_number_before_an_operator_of_this_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        value = x.sin().mul(1.0 if on_ranks else 0.8)
        return value.clone() @ WEIGHT

    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    explainer = Explainer([ranks], one, 0, ())
    (matrix,) = list_ops(ranks, "mm")
    monkeypatch.setattr("moeverify.explain.explain.is_own_op", lambda _, op: op == (0, matrix.number))
    (cause,) = explainer.explain(20)
    assert explainer.joint.op(cause.ops[0]).short == "mul"


def test_a_line_that_is_right_for_another_caller_is_not_named_but_its_call() -> None:
    def double(x: Tensor) -> Tensor:
        return torch.cat([x, x])

    def shift(y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        first = double(y)[:8]
        return first, double(mask)[2:10]

    def run(x: Tensor, on_ranks: int) -> Tensor:
        y, mask = x.sin(), (x > 0.5).double() * 0.1
        if on_ranks:
            y, mask = shift(y, mask)
        return (y * (1.0 - mask)).tanh() @ WEIGHT

    assert ("extra", "double(mask)") in list_leads(run, proves=True)


def observe(before: Tensor, after: Tensor) -> Tensor:
    return after - before


def test_the_users_line_that_made_a_value_of_another_place_leads_before_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights that were written to another place are right by themselves; the update that we subtract is wrong."""
    monkeypatch.setattr("moeverify.explain.chains.is_own", lambda site: site.function == "observe")

    def run(x: Tensor, order: Tensor) -> Tensor:
        return observe(x.sin(), (x + 1.0)[order])

    ranks, one = (
        record_call(lambda x, order=order: run(x, order), None, x=make(6, 4))
        for order in (torch.tensor([3, 4, 5, 0, 1, 2]), torch.arange(6))
    )
    (cause,) = Explainer([ranks], one, 0, ()).explain(10.0, proves=False)
    assert ranks.ops[cause.ops[0][1]].short == "index"


def test_an_operator_takes_a_pair_of_tensors_of_one_shape() -> None:
    program = record_call(lambda x, y: (x * 3.0 - y) * y.sum(), x=make(4, 5), y=make(4, 5, seed=1))
    joint = Joint([program])
    pairs = [op.short for op in program.ops if takes_pair(joint, (0, op.number))]
    assert pairs == ["sub"]
