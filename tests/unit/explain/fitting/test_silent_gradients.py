"""Gradients that never return to a module: the graph is cut inside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from wrong_tensors import draw, examine, make_origin

from moeverify.explain.fitting.first_divergence import Search, find_origins
from moeverify.explain.fitting.rank_readings import RankReadings
from moeverify.results.cause import Cause
from moeverify.results.operation import Zeroed
from moeverify.train.module_taps import Tap


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
