"""How what queries see of their keys block by block is merged, in words: `with ranks' chunks merged by ...`."""

from __future__ import annotations

from collections.abc import Mapping

# By rule; `{blocks}` are the chunks of ranks, or blocks of so many keys.
_RULES: Mapping[str, str] = {
    "base-2": "with {blocks} merged by 2 to the power of their logsumexp in place of e",
    "of-base-2": "with {blocks} merged by e to the power of their logsumexp to base 2",
    "opposite": "with {blocks} merged by the negative of their logsumexp",
    "largest": "with {blocks} merged by their largest score in place of their logsumexp",
    "of-own-largest": "with {blocks} merged by their logsumexp relative to their own largest score",
    "less-mean": "with {blocks} merged by their logsumexp less the score of the mean of their keys, as if keys had "
    "been centered and that not been added again",
    "mean-of-seen": "with {blocks} merged by the mean in place of the sum of the exponentials of the scores that a "
    "query sees",
    "equal": "with the mean of the softmaxes of {blocks} in place of one over all keys",
    "power": "with {blocks} merged by {number} times their logsumexp",
    "others-times": "with the softmax of other ranks' chunks counted {number} times as often as that of the rank's "
    "own one",
    "earlier-whole": "with {blocks} merged without rescaling what is summed up before when a further one comes",
    "later-whole": "with {blocks} merged without a weight on a further one when it comes",
    "both-whole": "with the sum of the softmaxes of {blocks} in place of one over all keys",
    "exchanged": "with {blocks} merged with two weights exchanged: that of what is summed up before, and that of a "
    "further one",
    "both-earlier": "with {blocks} merged with the weight of what is summed up before on a further one too",
    "both-later": "with {blocks} merged with the weight of a further one on what is summed up before too",
    "earlier-twice": "with {blocks} merged with what is summed up before rescaled twice when a further one comes",
    "later-twice": "with {blocks} merged with the weight of a further one applied twice",
    "last-alone": "with the last of {blocks} of which a query sees something in place of all",
    "log-of-last": "with {blocks} merged with the logsumexp of the last one in place of that of all before",
    "log-of-first": "with {blocks} merged with the logsumexp of the first one in place of that of all before",
    "of-largest": "with {blocks} merged relative to the largest logsumexp, without division by the sum of their "
    "weights",
}

# By part and way, of the chunks of ranks.
_OF_CHUNKS: Mapping[tuple[str, str], str] = {
    (
        "mask",
        "of-own",
    ): "with a causal mask for the keys of the rank's own chunk alone: a query sees all of the others",
    (
        "mask",
        "of-others",
    ): "with a causal mask for the keys of other ranks alone: a query sees all of its own rank",
    ("softmax", "mean-of-chunks"): "with the mean of the ranks' own softmaxes in place of one over all keys",
    ("softmax", "sum-of-chunks"): "with the sum of the ranks' own softmaxes in place of one over all keys",
    ("merge", "undivided"): "without the softmax's denominator, relative to the largest score",
    ("merge", "divided-twice"): "with the softmax's denominator applied twice, relative to the largest score",
    ("merge", "numerator-last"): "with the values of the last rank's chunk alone over the denominator of all",
    ("merge", "numerator-first"): "with the values of the rank's own chunk alone over the denominator of all",
    (
        "merge",
        "denominator-first",
    ): "with the values of all chunks over the denominator of the rank's own alone",
    (
        "merge",
        "denominator-factor",
    ): "with the factor that rescales earlier chunks in the place of their rescaled denominators",
    (
        "merge",
        "numerator-opposite",
    ): "with earlier chunks' values divided by what rescales them, not multiplied",
    (
        "merge",
        "denominator-opposite",
    ): "with earlier chunks' denominators divided by what rescales them, not multiplied",
    ("merge", "both-opposite"): "with earlier chunks divided by what rescales them, not multiplied",
    ("merge", "denominator-mean"): "with the mean over each chunk's keys in place of the sum below",
    (
        "blocks-back",
        "delta-of-block",
    ): "with the product of each rank's chunk's own output and its gradient, in place of "
    "that of the merged output, taken off the gradient of the weights",
    (
        "blocks-back",
        "lse-of-block",
    ): "with weights by the logsumexp of each rank's chunk alone in place of that of all",
    ("blocks-back", "no-delta"): "without the gradient that comes through the softmax's denominator",
    ("keys-back", "own"): "of the keys of the rank's own chunk alone",
    ("keys-back", "not-own"): "without the keys of the rank's own chunk",
    ("keys-back", "last"): "of the keys alone that arrive last around the ring",
    ("keys-back", "without-turn"): "without the keys that arrive in turn {number} around the ring",
    (
        "queries",
        "own",
    ): "of the queries of each rank's own chunk alone, to keys or values that others see too",
    ("queries", "not-own"): "without the queries of each rank's own chunk",
    ("reach", "own"): "to the keys of the rank's own chunk alone",
    ("reach", "not-own"): "without the keys of the rank's own chunk",
    ("reach", "without-rank"): "without the keys of rank {number} over cp",
    (
        "reach",
        "without-turn",
    ): "without the keys that arrive in turn {number} around the ring, of the rank so many before over cp",
}

_ORDERS = {"in-order": " in the order of ranks", "back": ", those of the next ranks first,"}


_RESCALED = {"both": "them", "numerator": "their values", "denominator": "their denominators"}


def describe_merge(part: str, way: str, name: str, number: str) -> str:
    """Return in words how blocks of keys are merged; `name` says which blocks."""
    blocks, what = _name_blocks(name), way.partition("-")[2]
    if part == "softmax" and what in _RESCALED:
        return f"with {blocks} merged without rescaling {_RESCALED[what]} to the largest score of all"
    words = _OF_CHUNKS.get((part, way))
    if words is None:
        return _RULES[way].format(blocks=blocks, number=number)
    where = f", where chunks are {blocks}" if part == "merge" and name else ""
    return words.format(number=number) + where


def _name_blocks(name: str) -> str:
    """Return which blocks are merged, in words: those of ranks, in some order, or of so many keys."""
    return f"blocks of {name} keys" if name.isdecimal() else f"ranks' chunks{_ORDERS.get(name, '')}"
