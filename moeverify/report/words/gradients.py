"""How the gradient of a tensor inside of a formula comes back otherwise, in words."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.counted import describe_counted
from moeverify.results.change import Change

_EDGES: Mapping[str, str] = {
    "input": "its input",
    "output": "its output",
    "gate": "the gate",
    "up": "up",
    "activation": "the activation",
    "rows": "what comes to the experts",
    "outputs": "what the experts put out",
    "combine": "the combine weights",
    "numerator": "what the norm divides",
    "divisor": "what the norm divides by",
    "statistics": "the squares",
    "normed": "the normalized values",
    "mean": "the mean",
    "queries": "the queries",
    "keys": "the keys",
    "values": "the values",
    "key-groups": "the keys that query heads read",
    "value-groups": "the values that query heads read",
    "scores": "the scores",
    "weights": "the softmax",
    "denominator": "the softmax's denominator",
    "heads": "the outputs of heads",
    "logits": "the logits",
    "label": "the label's logit",
}
_OPERANDS: Mapping[str, str] = {
    "input": "the input",
    "output": "the output",
    "gate": "the gate",
    "up": "up",
    "activation": "the activation",
    "weight": "the weight",
    "root": "the root",
    "values": "what is divided",
    "normed": "the normalized values",
    "scores": "the scores",
    "weights": "the softmax",
    "combine": "the combine weights",
}
_HOW: Mapping[str, str] = {
    "mean": "averaged over its width",
    "summed": "summed over its width",
    "centred": "less its mean over its width",
    "first-element": "that of its first element in the place of each",
    "next-element": "that of the next element in the place of each",
    "element-before": "that of the element before in the place of each",
    "reversed": "with its elements in reverse order",
    "positive": "where it is positive alone",
    "sign": "its signs alone",
    "of-unit-length": "divided by its length",
    "bfloat16": "rounded to bfloat16",
    "float16": "rounded to float16",
    "float32": "rounded to float32",
    "next-position": "that of the next position in the place of each",
    "position-before": "that of the position before in the place of each",
    "next-row": "that of the next row of the batch in the place of each",
    "row-before": "that of the row of the batch before in the place of each",
    "first-position": "that of the first position in the place of each",
    "first-row": "that of the first row of the batch in the place of each",
    "first-token": "that of the first token in the place of each",
    "over-positions": "averaged over positions",
    "over-rows": "averaged over the rows of the batch",
    "over-tokens": "averaged over tokens",
    "summed-over-positions": "summed over positions",
    "summed-over-rows": "summed over the rows of the batch",
    "summed-over-tokens": "summed over tokens",
    "positions-reversed": "with positions in reverse order",
    "across": "with tokens and elements exchanged in blocks of as many tokens as it is wide",
    "next-head": "that of the next head in the place of each",
    "head-before": "that of the head before in the place of each",
    "over-heads": "averaged over heads",
    "next-query": "that of the next query in the place of each",
    "query-before": "that of the query before in the place of each",
    "over-queries": "averaged over queries",
    "turned": "with queries and keys exchanged",
    "first-of-group": "that of the first of the {number} query heads that read one head alone",
    "last-of-group": "that of the last of the {number} query heads that read one head alone",
    "first-part": "that of the first of {number} parts of the width alone",
    "last-part": "that of the last of {number} parts of the width alone",
    "mean-of-parts": "averaged over each of {number} parts of the width",
}
_TIMES: Mapping[str, str] = {
    "none": "without the gradient that comes through {what}",
    "twice": "with the gradient that comes through {what} twice",
    "opposite": "with the gradient that comes through {what} subtracted",
    "times": "with {number} times the gradient that comes through {what}",
}
_POWERS: Mapping[int, str] = {
    1: "multiplied by {operand} once more",
    -1: "divided by {operand} once more",
    2: "multiplied by {operand} twice more",
    -2: "divided by {operand} twice more",
}


def describe_gradient(change: Change, number: str) -> str:
    """Return a gradient that comes back otherwise in words; nothing for what is no such change."""
    if change.part != "gradient-of":
        return describe_counted(change, number)
    what, way = _EDGES[change.name], change.way
    if way in _TIMES:
        return _TIMES[way].format(what=what, number=number)
    if way.startswith("by-"):
        how = _POWERS[int(change.number or 1)].format(operand=_OPERANDS[way.removeprefix("by-")])
    else:
        how = _HOW[way].format(number=number)
    return f"with the gradient that comes through {what} {how}"
