"""Wrong masks, lost rows, reordered rows and multiples are traced to the lines that made them."""

from __future__ import annotations

from typing import Any

import torch
from generated import explain, explain_call, read
from recordings import data_of, find_result, make, record_call
from torch import Tensor
from torch.autograd import Function

from moeverify.explain.describe import describe_op
from moeverify.explain.explain import Explainer
from moeverify.explain.program import Program


def attend(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.T).masked_fill(~mask, -torch.inf).softmax(-1)


def make_mask(size: int, window: int) -> Tensor:
    places = torch.arange(size)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def test_a_number_that_makes_a_mask_is_the_culprit() -> None:
    culprits = explain_call(
        lambda q, k: attend(q, k, make_mask(8, 4)),
        lambda q, k: attend(q, k, make_mask(8, 3)),
        q=make(8, 4),
        k=make(8, 4, seed=1),
    )
    (culprit,) = culprits
    assert culprit.mechanism == "number"
    assert culprit.proved
    assert read(culprit.here) == "distance < window"
    assert culprit.numbers == (("4", "3"),)


def test_a_mask_without_one_of_its_conditions_shows_the_condition() -> None:
    def causal(size: int) -> Tensor:
        places = torch.arange(size)
        return places[:, None] >= places

    culprit, *_ = explain_call(
        lambda q, k: attend(q, k, causal(8)),
        lambda q, k: attend(q, k, make_mask(8, 3)),
        q=make(8, 4),
        k=make(8, 4, seed=1),
    )
    assert culprit.mechanism == "created"
    assert culprit.there is not None
    assert read(culprit.here) == "places[:, None] >= places"
    assert "distance < window" in read(culprit.there)


def test_rows_that_are_lost_before_a_line_of_both_sides_are_missed_there() -> None:
    def combine(y: Tensor, weights: Tensor, token: Tensor, lost: int) -> Tensor:
        kept = torch.cat([y[: len(y) - lost], torch.zeros(lost, 5, dtype=torch.float64)]) if lost else y
        weighted = kept * weights
        total = torch.zeros(4, 5, dtype=torch.float64).index_add(0, token, weighted)
        return total.tanh()

    def record(lost: int) -> Program:
        inputs = {"y": make(8, 5), "weights": make(8, 1, seed=1), "token": torch.arange(8) // 2}
        return record_call(lambda **each: combine(**each, lost=lost), None, **inputs)

    culprit, *_ = explain(record(2), record(0))
    assert culprit.mechanism == "operand"
    assert culprit.proved
    assert read(culprit.here) == "kept * weights"
    assert read(culprit.moves[-1]).startswith("torch.cat(")


def test_rows_in_another_order_are_traced_to_the_first_move_that_reordered_them() -> None:
    def run(x: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh(x * scale)

    def ranks(x: Tensor, scale: Tensor) -> Tensor:
        x = x.sin()
        parts = x.unflatten(1, (2, 2)).transpose(0, 1)
        joined = parts.reshape(3, 4, 5)
        return x + run(joined, scale)

    def one(x: Tensor, scale: Tensor) -> Tensor:
        x = x.sin()
        return x + run(x, scale)

    culprit, *_ = explain_call(ranks, one, x=make(3, 4, 5), scale=make(5, seed=1))
    assert culprit.proved
    assert read(culprit.here) == "x + run(joined, scale)"
    assert read(culprit.moves[-1]) == "parts.reshape(3, 4, 5)"


def test_a_value_added_to_itself_is_a_multiple() -> None:
    def norm(h: Tensor) -> Tensor:
        return torch.tanh(h.square().mean(-1, keepdim=True))

    def ranks(x: Tensor) -> Tensor:
        x = x.sin()
        return norm(x + x)

    culprit, *_ = explain_call(ranks, lambda x: norm(x.sin()), x=make(6, 5))
    assert culprit.mechanism == "scale"
    assert read(culprit.here) == "x + x"
    assert culprit.factor == 2.0


def test_a_number_of_another_line_proves_nothing_while_results_are_wrong() -> None:
    def ranks(x: Tensor, ids: Tensor) -> Tensor:
        kept = ids != 7
        total = torch.zeros(8, 3, dtype=torch.float64)
        total[ids[kept]] = x[kept]
        return total

    def one(x: Tensor, ids: Tensor) -> Tensor:
        return torch.zeros(8, 3, dtype=torch.float64).index_add(0, ids, x)

    culprits = explain_call(ranks, one, x=make(8, 3), ids=torch.tensor([0, 1, 2, 3, 1, 2, 6, 4]))
    assert not any(culprit.mechanism == "number" and culprit.proved for culprit in culprits)


def test_an_operand_with_another_factor_is_wrong_where_it_is_scaled() -> None:
    def ranks(x: Tensor, y: Tensor) -> Tensor:
        scaled = x.tanh() * 0.9
        return torch.stack([scaled, y]).sum(0).sin()

    def one(x: Tensor, y: Tensor) -> Tensor:
        return (x.tanh() * 0.4 + y).sin()

    (culprit,) = explain_call(ranks, one, x=make(6, 5), y=make(6, 5, seed=1))
    assert culprit.mechanism == "scale"
    assert culprit.proved
    assert read(culprit.here) == "x.tanh() * 0.9"


def test_an_operator_whose_result_is_a_multiple_by_chance_is_suspected_too() -> None:
    def ranks(x: Tensor) -> Tensor:
        wide = x.tanh()
        return ((wide + wide) * 1.5).sin()

    def one(x: Tensor) -> Tensor:
        wide = x.tanh()
        return (wide * wide * 1.5).sin()

    culprit, *_ = explain_call(ranks, one, x=make(6, 5))
    assert culprit.mechanism == "operator"
    assert culprit.proved
    assert read(culprit.here) == "wide + wide"


def test_lost_elements_are_traced_to_the_operator_that_set_them_to_zero() -> None:
    def ranks(x: Tensor, inside: Tensor, gradient: Tensor) -> Tensor:
        y = x.tanh()
        y = y * inside[:, None]
        return (gradient * y).flatten()

    x, gradient = make(4, 5), torch.tensor(0.7, dtype=torch.float64)
    inside = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    program = record_call(ranks, None, x=x, inside=inside, gradient=gradient)
    one = record_call(lambda x, gradient: (gradient * x.tanh()).flatten(), None, x=x, gradient=gradient)
    explainer = Explainer([program], one, 0, [])
    origins = explainer.origins
    right = data_of(one, find_result(one)[1])
    maker = origins.trace_zeros(find_result(program), right)
    assert maker is not None
    assert read(describe_op(program, program.ops[maker[1]])) == "y * inside[:, None]"
    assert origins.trace_zeros(find_result(program), right * inside.repeat_interleave(5)) is None


class Passed(Function):
    """Return the input; the gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad / ctx.size, None


def test_a_backward_line_that_layers_share_is_named_with_its_number() -> None:
    def train(x: Tensor, size: int) -> Tensor:
        x = x.clone().requires_grad_()
        hidden = x
        for _ in range(3):
            hidden = hidden + Passed.apply(hidden.sin(), size).cos()  # type: ignore[no-untyped-call]
        (gradient,) = torch.autograd.grad(hidden.square().sum(), x)
        return gradient

    culprit, *_ = explain(
        record_call(lambda x: train(x, 2), None, x=make(4, 5)),
        record_call(lambda x: train(x, 1), None, x=make(4, 5)),
    )
    assert (culprit.mechanism, culprit.numbers) == ("number", (("2", "1"),))
    assert read(culprit.here) == "grad / ctx.size"


def test_a_multiple_is_traced_through_a_padded_bucket() -> None:
    """The bucket is no multiple of any value: the padding and two tensors lie in it."""

    def reduce(a: Tensor, b: Tensor, twice: int) -> Tensor:
        flat = torch.cat([a.flatten(), a.new_zeros(3), b.flatten()])
        if twice:
            flat = flat + flat
        return (flat[a.numel() + 3 :].view_as(b) @ a.exp()).sin()

    culprit, *_ = explain_call(
        lambda a, b: reduce(a, b, 1), lambda a, b: reduce(a, b, 0), a=make(4, 4), b=make(4, 4, seed=1)
    )
    assert (culprit.mechanism, culprit.factor, read(culprit.here)) == ("scale", 2.0, "flat + flat")
