"""How the logits may be otherwise, and how gradients inside of the loss may come back, as it is written by hand.

- the *logits* may have passed through one function more: a cap, a clamp, a factor;
- a *gradient* inside, of the logits, of the softmax's denominator or of the label's logit, may be missing, be there
  twice, count a number of times that is fitted, or be of other elements.

Letters: b rows, S tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from moeverify.results.change import Change

_GRADIENT_OF = "gradient-of"
_TIMES: Mapping[str, float] = {"none": 0.0, "opposite": -1.0, "twice": 2.0}

_FUNCTIONS: Mapping[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "capped": (lambda x, number: number * torch.tanh(x / number), (1.0, 10.0)),
    "clamped": (lambda x, number: x.clamp(-number, number), (0.3, 1.0, 3.0)),
    "clamped-above": (lambda x, number: x.clamp(max=number), (0.3, 1.0, 3.0)),
    "times": (lambda x, number: x * number, (0.5, 2.0)),
}
"""What logits may have passed through besides, with the starts from which its number is fitted."""

_INSIDE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(-1, keepdim=True).expand_as(x),
    "summed": lambda x: x.sum(-1, keepdim=True).expand_as(x),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "first-element": lambda x: x[..., :1].expand_as(x),
    "next-element": lambda x: x.roll(-1, -1),
    "element-before": lambda x: x.roll(1, -1),
    "reversed": lambda x: x.flip(-1),
    "positive": lambda x: x.clamp(min=0.0),
    "sign": torch.sign,
    "of-unit-length": lambda x: torch.nn.functional.normalize(x, dim=-1),
    "bfloat16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "float16": lambda x: x.to(torch.float16).to(x.dtype),
    "float32": lambda x: x.to(torch.float32).to(x.dtype),
}
"""Of the elements of one token."""


def fit_functions(part: str) -> list[Change]:
    """Return the functions that a tensor may have passed through besides, at the starts of their fits."""
    return [
        Change(part=part, way=way, number=start)
        for way, (_, starts) in _FUNCTIONS.items()
        for start in starts
    ]


def pass_through(x: Tensor, change: Change | None) -> Tensor:
    """Return a tensor as it comes out of what it has passed through besides."""
    return x if change is None else _FUNCTIONS[change.way][0](x, float(change.number or 1.0))


def list_gradients(*edges: str) -> list[Change]:
    """Return how often the gradient of each of some tensors inside may count otherwise."""
    return [Change(part=_GRADIENT_OF, way=way, name=edge) for edge in edges for way in _TIMES]


def list_gradient_ways(edge: str) -> list[Change]:
    """Return how else the gradient of a tensor inside, (b, S, V), may come back."""
    return [Change(part=_GRADIENT_OF, way=way, name=edge) for way in (*_TIMES, *_INSIDE)]


def fit_gradients(*edges: str) -> list[Change]:
    """Return the starts from which the number is fitted by which such a gradient is multiplied."""
    starts = (0.5, 2.0)
    return [
        Change(part=_GRADIENT_OF, way="times", number=start, name=edge) for edge in edges for start in starts
    ]


def weigh_gradient(x: Tensor, edge: str, changes: Mapping[str, Change]) -> Tensor:
    """Return a tensor inside of the loss, whose gradient comes back otherwise where a change says so."""
    change = changes.get(f"{_GRADIENT_OF}:{edge}")
    if change is None or not x.requires_grad:
        return x
    passed = x.view_as(x)
    passed.register_hook(partial(_change_gradient, change=change))  # type: ignore[no-untyped-call]
    return passed


def _change_gradient(gradient: Tensor, change: Change) -> Tensor:
    if change.way in _INSIDE:
        return _INSIDE[change.way](gradient)
    return gradient * _TIMES.get(change.way, 1.0 if change.number is None else float(change.number))
