"""Gradients that never return to a module: the graph is cut inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrong_tensors import draw, examine, make_origin

from moeverify.cases.schema import MoE as MoESpec
from moeverify.explain.fitting.first_divergence import Known, Search, find_origins
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.rank_readings import RankReadings
from moeverify.model.dispatcher import ExpertFunction, LocalDispatcher
from moeverify.model.expert_weights import ExpertWeights
from moeverify.model.moe import MoE
from moeverify.results.cause import Cause
from moeverify.results.operation import Zeroed
from moeverify.train.module_taps import Tap

Kernel = Callable[[Tensor, Tensor, ExpertWeights], Tensor]


class Model(nn.Module):
    """A model whose inner module may compute from a tensor without a graph."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Inner(is_cut=is_cut)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


class Inner(nn.Module):
    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.is_cut, self.linear = is_cut, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach() if self.is_cut else x)


def read(*, is_cut: bool) -> Tap:
    torch.manual_seed(0)
    model = Model(is_cut=is_cut).double()
    tap = Tap(model, 2, 3, scale=1.0, limit=1 << 20)
    with tap.reading():
        model(draw(2, 3, 4)).square().sum().backward()
    return tap


def search(*, is_cut: bool) -> Search:
    tap = read(is_cut=is_cut)
    ranks = [RankReadings(tap.readings, [(range(2), range(3))], frozenset(tap.silent))]
    return find_origins(read(is_cut=False).readings, ranks, {0: {}}, 1, torch.float64)


def test_the_tap_knows_which_inputs_got_no_gradient() -> None:
    assert ("inner", "input", "0", 0) in read(is_cut=True).silent
    assert ("inner", "input", "0", 0) not in read(is_cut=False).silent


def test_a_module_inside_of_which_the_graph_is_cut_is_where_it_began() -> None:
    origin = search(is_cut=True).origins["backward"]
    assert (origin.culprit, origin.end) == ("inner", "input")
    assert not origin.tensor.whole.any()
    assert search(is_cut=False).origins == {}


@pytest.mark.parametrize(("actual", "cause"), [(0.0, Cause.DETACHED), (1.0, None)])
def test_a_gradient_of_zeros_is_detached(actual: float, cause: Cause | None) -> None:
    expected = draw(2, 3, 4)
    tensor, inputs = make_origin(expected, actual * draw(2, 3, 4, seed=1), direction="backward")
    explanation = examine("detached", tensor, inputs).explanation
    assert (None if explanation is None else explanation.cause) is cause
    assert explanation is None or explanation.operation == Zeroed()


def no_graph(kernel: Kernel) -> Kernel:
    def multiply(x: Tensor, counts: Tensor, weights: ExpertWeights) -> Tensor:
        with torch.no_grad():
            return kernel(x, counts, weights)

    return multiply


def no_way_to_the_input(kernel: Kernel) -> Kernel:
    return lambda x, counts, weights: kernel(x.detach(), counts, weights)


class NoBackward(torch.autograd.Function):
    """A kernel without a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return torch.zeros_like(grad), None


def zeros_back(kernel: Kernel) -> Kernel:
    def multiply(x: Tensor, counts: Tensor, weights: ExpertWeights) -> Tensor:
        return NoBackward.apply(x, kernel(x, counts, weights).detach())  # type: ignore[no-any-return]

    return multiply


class CutDispatcher(LocalDispatcher):
    """A dispatcher that detaches the rows to the experts, or their results."""

    def __init__(self, num_experts: int, *, before: bool) -> None:
        super().__init__(num_experts)
        self.before = before

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        if self.before:
            return super().__call__(x.detach(), ids, weights, experts)
        return super().__call__(x, ids, weights, lambda rows, counts: experts(rows, counts).detach())


def cut_core(wrap: Callable[[Kernel], Kernel]) -> Callable[[MoE], None]:
    def change(block: MoE) -> None:
        block.experts.core = wrap(block.experts.core)

    return change


def cut_dispatcher(*, before: bool) -> Callable[[MoE], None]:
    def change(block: MoE) -> None:
        block.dispatcher = CutDispatcher(4, before=before)

    return change


class Around(nn.Module):
    """A model that computes the input of a mixture of experts, so the input needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        spec = MoESpec(num_experts=4, top_k=2, expert_hidden=8, shared_hidden=8)
        factory = {"dtype": torch.float64, "device": torch.device("cpu")}
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.moe = MoE(4, spec, mlp_bias=False, backend="loop", factory=factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))[0]


def train_block(change: Callable[[MoE], None] | None) -> tuple[Tap, dict[str, Tensor | None]]:
    model = Around()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(0.3 * draw(*weight.shape, seed=number))
    if change is not None:
        change(model.moe)
    tap = Tap(model, 2, 3, scale=1.0, limit=1 << 20)
    with tap.reading():
        model(draw(2, 3, 4)).square().sum().backward()
    return tap, {name: weight.grad for name, weight in model.named_parameters()}


def search_block(change: Callable[[MoE], None]) -> Search:
    golden, right = train_block(None)
    tap, found = train_block(change)
    wrong = [name for name, grad in found.items() if grad is None or not torch.equal(grad, right[name])]
    ranks = [RankReadings(tap.readings, [(range(2), range(3))], frozenset(tap.silent), tap.reached)]
    return find_origins(golden.readings, ranks, {0: {}}, 1, torch.float64, Known(gradients=wrong))


@pytest.mark.parametrize(
    ("change", "cut"),
    [
        (cut_core(no_graph), "moe.experts"),
        (cut_core(no_way_to_the_input), "moe.experts"),
        (cut_core(zeros_back), "moe.experts"),
        (cut_dispatcher(before=True), ""),
        (cut_dispatcher(before=False), ""),
    ],
)
def test_a_cut_is_where_a_gradient_comes_in_and_does_not_go_out(
    change: Callable[[MoE], None], cut: str
) -> None:
    found = search_block(change)
    origin = found.origins["backward"]
    assert origin.culprit == "moe.dispatcher"
    assert not origin.tensor.whole.any()
    assert found.find_cut(origin) == cut
    explanation = examine("detached", origin.tensor, DiagnosisInputs(search=found)).explanation
    assert explanation is not None
    assert explanation.subject.module == (cut or "moe.dispatcher")


def test_nothing_is_cut_in_a_right_block() -> None:
    assert search_block(lambda block: None).cuts == frozenset()
