"""The grammar of mistakes in words: a term, a tensor, a gradient or a function that is otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.operation import Change

_FUNCTIONS: Mapping[str, str] = {
    "normalized": "normalized once more",
    "of-unit-length": "divided by its length",
    "centred": "less its mean",
    "standardized": "normalized once more, less its mean",
    "softmax": "after a softmax",
    "log-softmax": "after a logarithm of the softmax",
    "sigmoid": "after a sigmoid",
    "tanh": "after a tanh",
    "silu": "after a silu",
    "gelu": "after a gelu",
    "relu": "after a relu",
    "absolute": "without its signs",
    "squared": "squared",
    "reversed": "with its elements in reverse order",
    "capped": "capped at {number} by a tanh",
    "clamped": "clamped to at most {number} in size",
    "clamped-above": "clamped to at most {number}",
    "plus": "with {number} added to every element",
    "minus": "with {number} subtracted from every element",
    "times": "{number} times as large",
}
_ENDS = {"input-through": "input", "output-through": "output"}
_GRADIENTS: Mapping[str, str] = {
    "none": "without the gradient that comes through {what}",
    "twice": "with the gradient that comes through {what} twice",
    "opposite": "with the gradient that comes through {what} subtracted",
    "times": "with {number} times the gradient that comes through {what}",
}
_EDGES: Mapping[str, str] = {
    "gate": "the gate",
    "up": "up",
    "activation": "the activation",
    "numerator": "what the norm divides",
    "queries": "the queries",
    "keys": "the keys",
    "values": "the values",
    "scores": "the scores",
    "weights": "the softmax",
    "denominator": "the softmax's denominator",
}
_DERIVATIVES = {
    "of-sigmoid-alone": "with the gradient of the activation's sigmoid alone",
    "linear": "with the gradient of an activation whose sigmoid is taken for a constant",
    "none": "with the gradient of the activation left out, as if it changed nothing",
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu-tanh": "the tanh approximation of gelu",
    "quick-gelu": "quick gelu, x * sigmoid(1.702 x)",
    "silu": "silu",
    "relu": "relu",
    "relu-squared": "the square of relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "elu": "elu",
    "selu": "selu",
    "mish": "mish",
    "softplus": "softplus",
    "hardswish": "hardswish",
    "relu6": "relu6",
    "softsign": "softsign",
    "swish": "x * sigmoid({number} x)",
    "leaky-relu": "a leaky relu of slope {number}",
}
_CLAMPS = {
    "gate-above-and-up": "with the gate clamped to at most {number}, and up on both sides",
    "gate-above": "with the gate clamped to at most {number}",
    "gate": "with the gate clamped to {number} on both sides",
    "up": "with up clamped to {number} on both sides",
    "both": "with gate and up clamped to {number} on both sides",
}
_EMBEDDINGS: Mapping[tuple[str, str], str] = {
    ("rows", "shifted"): "with the row {number} further in the place of each token's",
    ("rows", "reversed"): "with rows counted from the end",
    ("row", "zero"): "with zeros for token {number}, as for padding",
    ("positions", "sinusoids"): "with sinusoids of the positions added",
    ("positions", "sinusoids-in-turn"): "with sinusoids of the positions added, sine and cosine in turn",
    ("positions", "numbers"): "with {number} times the position added",
}


def describe_mistake(change: Change, number: str) -> str:
    """Return a change of the grammar in words; nothing for one that is a formula's own."""
    if change.part in _ENDS:
        return f"with its {_ENDS[change.part]} {_FUNCTIONS[change.way].format(number=number)}"
    if change.part == "gradient-of":
        return _GRADIENTS[change.way].format(what=_EDGES[change.name], number=number)
    if change.part == "derivative":
        known = _DERIVATIVES.get(change.way)
        return known or f"with the gradient of {_ACTIVATIONS[change.way]} for that of the activation"
    if change.part == "activation" and change.way != "none":
        return f"with {_ACTIVATIONS[change.way].format(number=number)}"
    if change.part == "clamp":
        return _CLAMPS[change.way].format(number=number)
    return _EMBEDDINGS.get((change.part, change.way), "").format(number=number)
