"""The grammar of mistakes: how any term, tensor or function of a formula may be otherwise, spelled once for all.

A formula says what it is made of, and its variants follow:

- a *term* of a sum may be missing, be there twice, be subtracted, or count a number of times that is fitted;
- a *tensor* may have passed through one function more on its way in or out: a cap, a clamp, a norm, an activation, a
  constant that is added;
- a *gradient*, of any tensor inside, may come back otherwise in the ways of
  `moeverify.diagnose.replay.gradient_ways`;
- a *function* may have the right value and the gradient of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moeverify.diagnose.replay.gradient_ways import GRADIENT_OF, weigh_gradient
from moeverify.results.change import Change

_TIMES: Mapping[str, float] = {"none": 0.0, "opposite": -1.0, "twice": 2.0}
_EPS = (1e-6, 1e-5, 1e-8, 0.0)  # of a norm that is there once too often

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "of-unit-length": lambda x: functional.normalize(x, dim=-1),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "less-largest": lambda x: x - x.amax(-1, keepdim=True),
    "standardized": lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-5),
    "softmax": lambda x: x.softmax(-1),
    "log-softmax": lambda x: x.log_softmax(-1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "absolute": torch.abs,
    "squared": torch.square,
    "reversed": lambda x: x.flip(-1),
}
"""What a tensor may have passed through besides, without a number that is not known."""

HEAD_FUNCTIONS = ("of-unit-length", "centred", "standardized", "sigmoid", "tanh", "silu", "relu", "reversed")
"""Those of what stands in the middle of a formula, such as the values of attention."""

_WITH_NUMBER: Mapping[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "capped": (lambda x, number: number * torch.tanh(x / number), (1.0, 10.0)),
    "clamped": (lambda x, number: x.clamp(-number, number), (0.3, 1.0, 3.0)),
    "shortened": (
        lambda x, number: x * (number / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0),
        (0.1, 1.0),
    ),
    "clamped-above": (lambda x, number: x.clamp(max=number), (0.3, 1.0, 3.0)),
    "plus": (lambda x, number: x + number, (0.5,)),
    "minus": (lambda x, number: x - number, (0.5,)),
    "times": (lambda x, number: x * number, (0.5, 2.0)),
}


def list_terms(part: str, name: str = "") -> list[Change]:
    """Return how a term of a sum may be otherwise, without a number."""
    return [Change(part=part, way=way, name=name) for way in _TIMES]


def fit_terms(part: str, name: str = "") -> list[Change]:
    """Return the starts from which the number of times is fitted that a term counts."""
    return [Change(part=part, way="times", number=number, name=name) for number in (0.5, 2.0)]


def times_of(change: Change | None) -> float:
    """Return how often a term counts."""
    if change is None:
        return 1.0
    return _TIMES.get(change.way, float(change.number or 0.0))


def list_functions(part: str, names: Iterable[str] = tuple(FUNCTIONS)) -> list[Change]:
    """Return the functions that a tensor may have passed through besides, by their part: `input-through`."""
    norms = [Change(part=part, way="normalized", number=eps) for eps in _EPS]
    return [*norms, *(Change(part=part, way=way) for way in names)]


def fit_functions(part: str, *, but: Sequence[str] = ()) -> list[Change]:
    """Return those with a number, at the starts of its fit."""
    return [
        Change(part=part, way=way, number=start)
        for way, (_, starts) in _WITH_NUMBER.items()
        for start in starts
        if way not in but
    ]


def pass_through(x: Tensor, change: Change | None) -> Tensor:
    """Return a tensor (..., F) as it comes out of what it has passed through besides."""
    if change is None:
        return x
    if change.way in FUNCTIONS:
        return FUNCTIONS[change.way](x)
    if change.way == "normalized":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(change.number or 0.0))
    return _WITH_NUMBER[change.way][0](x, float(change.number or 1.0))


def list_gradients(*edges: str) -> list[Change]:
    """Return how often the gradient of each of some tensors inside of a formula may count otherwise."""
    return [change for edge in edges for change in list_terms(GRADIENT_OF, edge)]


def fit_gradients(*edges: str) -> list[Change]:
    """Return the starts from which the number is fitted by which such a gradient is multiplied."""
    return [change for edge in edges for change in fit_terms(GRADIENT_OF, edge)]


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """Return a value that has the gradient of another one."""
    return value.detach() + (other - other.detach())


def visit(x: Tensor, edge: str, changes: Mapping[str, Change]) -> Tensor:
    """Return a tensor inside of a formula: passed through one function more, or with another gradient."""
    return weigh_gradient(pass_through(x, changes.get(f"{edge}-through")), edge, changes)
