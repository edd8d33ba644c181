"""Initial values that were drawn by another rule: named from the values alone, and only where these are enough."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from wrong_tensors import AXES, make_inputs, make_tensor

from moeverify.diagnose.initial_values import explain_initial_values
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.initial_values import Draw, Drawn
from moeverify.results.operation import Operation

C, R, BOTH = "columns of the weight", "rows of the weight", "rows and columns of the weight"
SHAPES = [(96, 32), (32, 32), (32, 96), (48, 24), (24, 96), (64, 40)]
Fill = Callable[[Tensor], object]


def start(
    fill: Fill, shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64
) -> list[Operation]:
    """Return what is said of weights that are filled otherwise, where normal values by the columns are right."""
    tensors: list[WrongTensor] = []
    for number, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(1000 + number)
        right = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1] * 1.3)
        wrong = torch.empty(shape, dtype=torch.float64)
        torch.manual_seed(number)
        fill(wrong)
        stored = [each.to(dtype).to(torch.float64) for each in (right, wrong)]
        name = f"layers.{number}.weight{number}"
        tensors.append(make_tensor(*stored, name=name, kind="initial_weight", precision=dtype))
    causes = explain_initial_values(tensors, make_inputs(*tensors, axes=AXES))
    return [cause.explanation.operation for cause in causes if cause.explanation is not None]


def uniform(times: float, *over: str) -> Draw:
    return Draw(distribution="uniform", times=times, over=over)


def normal(times: float, *over: str) -> Draw:
    return Draw(distribution="normal", times=times, over=over)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("fill", "draw"),
    [
        (lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5.0)), uniform(1.0, C)),
        (nn.init.kaiming_uniform_, uniform(6.0, C)),
        (nn.init.xavier_uniform_, uniform(6.0, BOTH)),
        (
            lambda w: nn.init.uniform_(w, -math.sqrt(3.0 / w.shape[-1]), math.sqrt(3.0 / w.shape[-1])),
            uniform(3.0, C),
        ),
        (nn.init.kaiming_normal_, normal(2.0, C)),
        (lambda w: nn.init.kaiming_normal_(w, mode="fan_out"), normal(2.0, R)),
        (nn.init.xavier_normal_, normal(2.0, BOTH)),
        (nn.init.ones_, Draw(distribution="constant", number=1.0)),
        (lambda w: nn.init.constant_(w, 0.25), Draw(distribution="constant", number=0.25)),
        (nn.init.eye_, Draw(distribution="identity", number=1.0)),
        (lambda w: nn.init.normal_(w, 0.0, (1.0 / (1.3 * w.shape[-1])) ** 0.5), Draw(distribution="right")),
    ],
)
def test_the_rule_by_which_weights_were_drawn_is_named(fill: Fill, draw: Draw, dtype: torch.dtype) -> None:
    assert start(fill, dtype=dtype) == [Drawn(draws=(draw,))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_orthogonal_matrix_is_named(dtype: torch.dtype) -> None:
    for operation in start(nn.init.orthogonal_, dtype=dtype):
        assert isinstance(operation, Drawn)
        assert [draw.distribution for draw in operation.draws] == ["orthogonal"]


@pytest.mark.parametrize(("deviation", "cut"), [(0.02, 2), (0.05, 2), (0.02, 3)])
def test_a_cut_and_another_deviation_are_told_as_numbers(deviation: float, cut: int) -> None:
    bound = cut * deviation
    (operation,) = start(lambda w: nn.init.trunc_normal_(w, 0.0, deviation, -bound, bound), [(96, 128)] * 6)
    assert isinstance(operation, Drawn)
    assert {draw.cut for draw in operation.draws} == {cut}
    assert [draw.number for draw in operation.draws] == [pytest.approx(deviation, rel=0.02)]


@pytest.mark.parametrize("deviation", [0.02, 0.006, 0.4, 1.0])
def test_another_deviation_of_all_weights_is_told_as_a_number(deviation: float) -> None:
    (operation,) = start(lambda w: nn.init.normal_(w, 0.0, deviation))
    assert isinstance(operation, Drawn)
    assert [(draw.distribution, draw.cut) for draw in operation.draws] == [("normal", 0)]
    assert [draw.number for draw in operation.draws] == [pytest.approx(deviation, rel=0.03)]


def test_two_rules_are_two_causes() -> None:
    def fill(w: Tensor) -> None:
        nn.init.xavier_uniform_(w) if w.shape[-1] == 96 else nn.init.kaiming_normal_(w)

    told = start(fill, [*SHAPES, (16, 96), (80, 32), (128, 96)])
    assert told == [Drawn(draws=(normal(2.0, C),)), Drawn(draws=(uniform(6.0, BOTH),))] or told == [
        Drawn(draws=(uniform(6.0, BOTH),)),
        Drawn(draws=(normal(2.0, C),)),
    ]


@pytest.mark.parametrize(
    "fill",
    [
        lambda w: w.exponential_(),
        lambda w: w.copy_(torch.distributions.Laplace(0.0, 0.1).sample(w.shape)),
        lambda w: w.copy_(torch.randn(w.shape).double() ** 3 * 0.1),
        lambda w: w.uniform_(0.0, 0.1),
        lambda w: w.copy_(torch.randn(w.shape).double() * torch.rand(w.shape[0], 1).double() * 0.2),
    ],
)
def test_of_other_distributions_none_is_said(fill: Fill) -> None:
    assert not any(isinstance(operation, Drawn) for operation in start(fill))


@pytest.mark.parametrize("seed", range(6))
def test_of_tails_that_are_a_little_heavier_nothing_is_said(seed: int) -> None:
    """Two or three of these weights are near to some rule by chance, and the others are not."""
    tails = torch.distributions.StudentT(8.0)

    def fill(w: Tensor) -> None:
        torch.manual_seed(100 * seed + int(torch.initial_seed()))
        w.copy_(0.1 * tails.sample(w.shape))

    told = start(fill, [(96, 96), (16, 32), (64, 40), (48, 96), (16, 64), (96, 64), (32, 40), (64, 96)])
    assert not any(isinstance(operation, Drawn) for operation in told)


def test_what_is_no_number_is_not_drawn() -> None:
    assert not any(isinstance(operation, Drawn) for operation in start(lambda w: w.fill_(math.nan)))


def test_weights_that_should_be_all_one_may_be_drawn() -> None:
    tensors = []
    for number in range(4):
        ones, wrong = torch.ones(64, 32, dtype=torch.float64), torch.empty(64, 32, dtype=torch.float64)
        torch.manual_seed(number)
        nn.init.normal_(wrong, 0.0, 0.02)
        tensors.append(make_tensor(ones, wrong, name=f"layers.{number}.w", kind="initial_weight"))
    (cause,) = explain_initial_values(tensors, make_inputs(*tensors, axes=AXES))
    assert cause.explanation is not None
    assert isinstance(cause.explanation.operation, Drawn)


def test_of_few_values_nothing_is_said() -> None:
    told = start(nn.init.xavier_normal_, [(4, 8), (8, 8), (8, 4)])
    assert not any(isinstance(operation, Drawn) for operation in told)


def test_a_width_that_fits_one_deviation_alone_is_hardly_ever_said() -> None:
    """Deviations drawn by lot, of weights of one shape, are numbers, and no roots of sizes."""
    named = 0
    for seed in range(40):
        deviation = math.exp(torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() * 3.0 - 3.5)
        told = start(lambda w, size=deviation: nn.init.normal_(w, 0.0, size), [(64, 48)] * 2)  # type: ignore[misc]
        named += any(draw.over for each in told if isinstance(each, Drawn) for draw in each.draws)
    assert named <= 1
