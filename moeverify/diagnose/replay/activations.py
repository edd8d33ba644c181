"""The inside of a feed-forward block, gate and up (..., F), with a part of it otherwise: dense, shared or routed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from moeverify.diagnose.replay.derivatives import OF_SUM, differentiate_otherwise, list_sums
from moeverify.diagnose.replay.gradient_ways import list_edge_ways, weigh_gradient
from moeverify.diagnose.replay.grammar import with_gradient_of
from moeverify.results.change import Change

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu-squared": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "none": lambda x: x,
    "elu": functional.elu,
    "selu": functional.selu,
    "mish": functional.mish,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
    "softsign": functional.softsign,
}

_FITTED: Mapping[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "swish": (lambda x, beta: x * torch.sigmoid(beta * x), (0.5, 2.0)),
    "cubic-gelu": (
        lambda x, cubic: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + cubic * x**3))),
        (0.1,),
    ),
    "sigmoid-of": (lambda x, beta: (beta * x).sigmoid(), (2.0,)),
    "leaky-relu": (functional.leaky_relu, (0.05,)),
}

_CLAMPS: Mapping[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    # As gpt-oss has it: the gate from above, up on both sides.
    "gate-above-and-up": lambda gate, up, at: (gate.clamp(max=at), up.clamp(-at, at)),
    "gate-above": lambda gate, up, at: (gate.clamp(max=at), up),
    "gate": lambda gate, up, at: (gate.clamp(-at, at), up),
    "up": lambda gate, up, at: (gate, up.clamp(-at, at)),
    "both": lambda gate, up, at: (gate.clamp(-at, at), up.clamp(-at, at)),
}

_GATES = (
    "exchanged",
    "none",
    "alone",
    "interleaved",
    "added",
    "up-plus-one",
    "of-product",
    "up-squared",
    "bilinear",
    "halves",
)


def list_activations(*, has_gate: bool) -> list[Change]:
    """Return the ways in which the inside of a feed-forward block may be otherwise."""
    ways = [Change(part="activation", way=way) for way in ACTIVATIONS]
    if has_gate:
        ways += [Change(part="gate", way=way) for way in _GATES]
    return ways


def fit_activations(*, has_gate: bool) -> list[Change]:
    """Return those with a number that is not known: a slope, the place of a clamp."""
    found = [
        Change(part="activation", way=way, number=start)
        for way, (_, starts) in _FITTED.items()
        for start in starts
    ]
    if has_gate:
        found += [
            Change(part="clamp", way=way, number=start) for way in _CLAMPS for start in (0.1, 0.3, 1.0, 3.0)
        ]
    return found


def list_derivatives(*, has_gate: bool) -> list[Change]:
    """Return the functions whose gradient a right activation may have, or its own with a part otherwise."""
    # That of softplus is the sigmoid, as of a silu whose other part is a constant.
    ways = [Change(part="derivative", way=way) for way in ACTIVATIONS if way != "softplus"]
    others = ("of-sigmoid-alone", "linear", "at-output", "at-up", "at-product", "at-bfloat16")
    ways += [Change(part="derivative", way=way) for way in others]
    return ways + list_sums("silu" if has_gate else "gelu")


def list_gradients_inside(*edges: str, over_tokens: bool = True) -> list[Change]:
    """Return how the gradients of gate, up and their activation may come back otherwise."""
    return list_edge_ways(*edges, operands=("gate", "up", "activation"), over_tokens=over_tokens)


def _differentiate(
    value: Tensor, x: Tensor, change: Change | None, up: Tensor, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the value of an activation of x with the gradient of another function, or of it at another place."""
    if change is None:
        return value
    if change.way in OF_SUM:
        return with_gradient_of(value, x * differentiate_otherwise(x.detach(), change))
    places: Mapping[str, Callable[[], Tensor]] = {
        "at-output": lambda: value,
        "at-up": lambda: up,
        "at-product": lambda: value * up,
        "at-bfloat16": lambda: x.to(torch.bfloat16).to(x.dtype),
    }
    if change.way in places:
        place = places[change.way]().detach().requires_grad_()
        (slope,) = torch.autograd.grad(act(place).sum(), place)
        return with_gradient_of(value, x * slope)
    if change.way == "of-sigmoid-alone":  # of x * sigmoid(x) the part that x itself has none in
        return with_gradient_of(value, x.detach() * x.sigmoid())
    if change.way == "linear":
        return with_gradient_of(value, x * x.detach().sigmoid())
    return with_gradient_of(value, ACTIVATIONS[change.way](x))


def activate(gate: Tensor | None, up: Tensor, changes: Mapping[str, Change]) -> Tensor:
    """Return the activation of gate and up, each (..., F); of up alone where there is no gate."""
    operands = {"up": up, "gate": up if gate is None else gate}

    def act(x: Tensor) -> Tensor:
        change, right = changes.get("activation"), "gelu" if gate is None else "silu"
        if change is not None and change.way in _FITTED:
            return _FITTED[change.way][0](x, float(change.number or 1.0))
        function = ACTIVATIONS[right if change is None else change.way]
        value = operands["activation"] = function(x)
        value = _differentiate(value, x, changes.get("derivative"), up, function)
        return weigh_gradient(value, "activation", changes, operands)

    if gate is None:
        return act(weigh_gradient(up, "up", changes, operands))
    way = changes["gate"].way if "gate" in changes else ""
    one = weigh_gradient(gate, "gate", changes, operands)
    two = weigh_gradient(up, "up", changes, operands)
    if "clamp" in changes:
        clamp = changes["clamp"]
        one, two = _CLAMPS[clamp.way](one, two, float(clamp.number or 1.0))
    if way in ("interleaved", "halves"):
        pairs = torch.cat([one, two], dim=-1)
        half = one.shape[-1]
        in_turn = pairs.view(*pairs.shape[:-1], half, 2) if way == "interleaved" else None
        one, two = (in_turn[..., 0], in_turn[..., 1]) if in_turn is not None else (two, two)
    ways: Mapping[str, Callable[[], Tensor]] = {
        "exchanged": lambda: act(two) * one,
        "none": lambda: act(two),
        "alone": lambda: act(one),
        "added": lambda: act(one) + two,
        "up-plus-one": lambda: act(one) * (two + 1.0),
        "of-product": lambda: act(one * two),
        "up-squared": lambda: act(two) * two,
        "bilinear": lambda: one * two,
    }
    return ways[way]() if way in ways else act(one) * two
