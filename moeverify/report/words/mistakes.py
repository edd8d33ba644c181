"""The grammar of mistakes in words: a term, a tensor, a gradient or a function that is otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.change import Change

_FUNCTIONS: Mapping[str, str] = {
    "normalized": "normalized once more, with an eps of {number}",
    "shortened": "cut to a length of at most {number}",
    "of-unit-length": "divided by its length",
    "centred": "less its mean",
    "less-largest": "less its largest element",
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
_ENDS = {
    "input-through": "its input",
    "output-through": "its output",
    "logits-through": "its logits",
    "queries-through": "the queries",
    "keys-through": "the keys",
    "values-through": "the values",
    "heads-through": "the output of each head",
}
_DERIVATIVES = {
    "of-sigmoid-alone": "with the gradient of the activation's sigmoid alone",
    "linear": "with the gradient of an activation whose sigmoid is taken for a constant",
    "none": "with the gradient of the activation left out, as if it changed nothing",
    "at-output": "with the slope of the activation at its output, not at its input",
    "at-up": "with the slope of the activation at up, not at the gate",
    "at-product": "with the slope of the activation at the product with up, not at the gate",
    "at-bfloat16": "with the slope of the activation at its input rounded to bfloat16",
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
    "softsign": "softsign",
    "swish": "x * sigmoid({number} x)",
    "cubic-gelu": "the tanh approximation of gelu with {number} in place of 0.044715",
    "sigmoid-of": "sigmoid({number} x)",
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
_LOSSES: Mapping[tuple[str, str], str] = {
    ("loss", "base-2"): "with a logarithm of base 2",
    ("loss", "base-10"): "with a logarithm of base 10",
    ("loss", "probability"): "with the probability of the label, without its logarithm",
    ("loss", "missing-probability"): "with 1 less the probability of the label",
    ("loss", "squared"): "with the square of each token's loss",
    ("loss", "exponential"): "with the exponential of each token's loss",
    ("loss", "focal"): "with a focal factor of (1 - probability) to the power of {number}",
    ("loss", "guarded"): "with {number} added to the probability before the logarithm",
    ("loss", "capped"): "with each token's loss cut off at {number}",
    ("loss", "plus"): "with {number} added to each token's loss",
    ("loss", "minus"): "with {number} subtracted from each token's loss",
    ("softmax-twice", "probabilities"): "with the softmax of the logits in the place of the logits",
    ("denominator", "without-label"): "with a denominator that leaves the label out",
    ("denominator", "largest"): "with the largest logit in place of the logarithm of the sum of exponentials",
    ("denominator", "less-largest"): "without adding the largest logit back after it was subtracted",
    (
        "denominator",
        "mean",
    ): "with the mean of the logits in place of the logarithm of the sum of exponentials",
    ("denominator", "over-positions"): "with a softmax over positions and not over the vocabulary",
    (
        "denominator",
        "own-part",
    ): "with a softmax over the label's own one of {number} parts of the vocabulary",
    ("denominator", "first-part"): "with a softmax over the first of {number} parts of the vocabulary",
    ("denominator", "sum-of-parts"): "with the logarithms of {number} parts of the vocabulary summed",
    ("denominator", "mean-of-parts"): "with the mean of the logarithms of {number} parts of the vocabulary",
    ("denominator", "all-twice"): "with {number} times the sum of exponentials",
    ("label", "of-position"): "with the label of the position {number} further in the place of each",
    ("label", "of-row"): "with the label of the row {number} further in the place of each",
    ("label", "class"): "with the class {number} further in the place of each label",
    ("smoothing", "all"): "with labels smoothed by {number}",
    ("smoothing", "all-subtracted"): "with labels smoothed by -{number}",
}
_TERMS: Mapping[str, tuple[str, str]] = {
    "first-of-silu": ("s", "s + x*s*(1-s) of silu, where s is the sigmoid"),
    "second-of-silu": ("x*s*(1-s)", "s + x*s*(1-s) of silu, where s is the sigmoid"),
    "first-of-gelu": ("c", "c + x*p of gelu, where c is the normal distribution and p its density"),
    "second-of-gelu": ("x*p", "c + x*p of gelu, where c is the normal distribution and p its density"),
}
_ADDED: Mapping[str, str] = {
    "log-sum-squared": "the square of the logarithm of the softmax's denominator",
    "log-sum": "the logarithm of the softmax's denominator",
    "missing-probability": "1 less the label's probability",
    "squared-loss": "the square of the loss",
    "entropy": "the entropy of the softmax",
    "largest-logit": "the largest logit",
    "mean-logit": "the mean of the logits",
    "squared-logits": "the mean square of the logits",
    "label-logit": "the label's logit",
}


def _describe_derivative(change: Change) -> str:
    """Return of which function the gradient is, or which term of a derivative is another product."""
    if change.way not in _TERMS:
        known = _DERIVATIVES.get(change.way)
        return known or f"with the gradient of {_ACTIVATIONS[change.way]} for that of the activation"
    right, whole = _TERMS[change.way]
    times = {1.0: "", -1.0: "-", 2.0: "2*"}
    other = f"{times[change.number]}{change.name}" if change.number else "0"
    return f"with {other} in place of {right} in the derivative {whole}"


def describe_mistake(change: Change, number: str) -> str:
    """Return a change of the grammar in words; nothing for one that is a formula's own."""
    key = change.part, change.way
    words = _EMBEDDINGS.get(key) or _LOSSES.get(key, "")
    if change.part in _ENDS:
        words = f"with {_ENDS[change.part]} {_FUNCTIONS[change.way]}"
    elif change.part == "derivative":
        words = _describe_derivative(change)
    elif change.part == "activation" and change.way != "none":
        words = f"with {_ACTIVATIONS[change.way]}"
    elif change.part == "added":
        words = f"with {{number}} times {_ADDED[change.name]} {change.way}"
    elif change.part == "clamp":
        words = _CLAMPS[change.way]
    return words.format(number=number)
