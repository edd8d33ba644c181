"""Ways in which attention computes otherwise than its formula, in words: `without a causal mask`."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.merging import describe_merge, name_blocks
from moeverify.results.change import Change

# By part and way; `{number}` is what the way leaves open.
ATTENTION: Mapping[tuple[str, str], str] = {
    ("mask", "none"): "without a causal mask: every query sees every key",
    ("mask", "diagonal"): "with a mask that hides a query's own position",
    ("mask", "reversed"): "with a mask that is turned round: a query sees what comes after it",
    ("mask", "offset"): "with a causal mask that is off by {number} positions",
    ("mask", "places"): "with a causal mask of local places in place of positions",
    ("mask", "arrivals"): "with a causal mask of the order in which ranks' keys arrive in place of positions",
    ("mask", "place-of-query"): "with a causal mask that takes local places for the positions of queries",
    ("mask", "place-of-key"): "with a causal mask that takes local places for the positions of keys",
    (
        "mask",
        "arrival-of-query",
    ): "with a causal mask that takes the order of ranks for the positions of queries",
    (
        "mask",
        "arrival-of-key",
    ): "with a causal mask that takes the order of arrival for the positions of keys",
    ("mask", "top-left"): "with a causal mask from the top left: queries are taken for the first of all keys",
    (
        "mask",
        "bottom-right",
    ): "with a causal mask from the bottom right: queries are taken for the last of all keys",
    ("mask", "ranks"): "with a causal mask of whole chunks: by the rank that has the key and not by position",
    (
        "mask",
        "of-rank",
    ): "with a mask of the positions that another rank's keys have, {number} further over cp",
    (
        "mask",
        "of-own",
    ): "with a causal mask for the keys of the rank's own chunk alone: a query sees all of the others",
    (
        "mask",
        "of-others",
    ): "with a causal mask for the keys of other ranks alone: a query sees all of its own rank",
    ("hidden", "zero-score"): "with scores of 0 in place of -inf where keys are hidden",
    ("hidden", "lowered"): "with {number} subtracted from the scores of hidden keys, in place of -inf",
    ("hidden", "value"): "with scores of -{number} in place of -inf where keys are hidden",
    ("hidden", "after-softmax"): "with a mask after the softmax, whose denominator still counts hidden keys",
    ("scale", "none"): "without the scale of the scores",
    ("scale", "width"): "with scores divided by the width of a head and not by its root, as if scaled twice",
    ("scale", "value-width"): "with scores divided by the root of the width of the values",
    ("scale", "rotated-width"): "with scores divided by the root of the rotated width",
    (
        "scale",
        "unrotated-width",
    ): "with scores divided by the root of the width that is not rotated",
    ("scale", "all-heads"): "with scores divided by the root of the width of all heads",
    ("scale", "hidden-width"): "with scores divided by the root of the hidden width",
    (
        "scale",
        "hidden-share",
    ): "with scores divided by the root of the hidden width over the number of heads, and not of the width of a head",
    ("scale", "kv-width"): "with scores divided by the root of the width of all key-value heads",
    (
        "scale",
        "log-length",
    ): "with scores multiplied by the logarithm of a query's number of keys to the base {number} + 1",
    (
        "scale",
        "log-position",
    ): "with scores multiplied by 1 + {number} log(1 + floor((position + 1) / {name}))",
    ("scores", "slopes"): "with a bias by distance on the scores, with the slopes of ALiBi",
    (
        "scores",
        "slopes-opposite",
    ): "with a bias by distance on the scores, with the slopes of ALiBi and the other sign",
    ("scores", "slopes-times"): "with {number} times the slopes of ALiBi as a bias by distance on the scores",
    ("scores", "distance"): "with {number} times the distance subtracted from the scores",
    ("value-rotation", "added"): "with the rotary embedding applied to the values too",
    (
        "value-rotation",
        "opposite",
    ): "with the rotary embedding applied to the values too, in the opposite direction",
    ("scale", "multiplied"): "with scores multiplied by the root of the width, not divided",
    ("scale", "factor"): "with scores that are {number}x the right ones",
    ("heads", "modulo"): "with query heads that read key-value heads in turn and not in groups",
    ("heads", "reversed"): "with query heads that read the key-value heads in reverse order",
    ("heads", "next"): "with query heads that read the next group's key-value head",
    ("heads", "first"): "with query heads that all read the first key-value head",
    ("heads", "of-rank"): "with query heads that read the key-value heads of the first rank over tp",
    ("outputs", "next"): "with the output of the next head in the place of each, in groups of {number}",
    ("outputs", "previous"): "with the output of the head before in the place of each, in groups of {number}",
    ("outputs", "reversed"): "with the outputs of heads in reverse order, in groups of {number}",
    (
        "outputs",
        "transposed",
    ): "with the outputs of heads in turn from groups of {number}, not group by group",
    ("outputs", "next-group"): "with the outputs of the next {number} heads in the place of each {number}",
    (
        "outputs",
        "previous-group",
    ): "with the outputs of the {number} heads before in the place of each {number}",
    (
        "outputs",
        "reversed-groups",
    ): "with the outputs of heads in groups of {number} that stand in reverse order",
    ("softmax", "mean-of-chunks"): "with the mean of the ranks' own softmaxes in place of one over all keys",
    ("softmax", "sum-of-chunks"): "with the sum of the ranks' own softmaxes in place of one over all keys",
    ("softmax", "extra-one"): "with 1 more in the softmax's denominator, as of a sink",
    ("softmax", "not-normalized"): "without the softmax's denominator",
    ("softmax", "extra"): "with {number} more in the softmax's denominator, as of a sink",
    ("softmax", "relative"): "without the softmax's denominator, relative to the largest score of the query",
    ("softmax", "of-queries"): "with a softmax over the queries and not over the keys",
    ("softmax", "sigmoid"): "with a sigmoid of the scores in place of a softmax",
    ("softmax", "relu"): "with a relu of the scores in place of a softmax",
    ("softmax", "squared"): "with the square of the softmax",
    ("softmax", "largest-alone"): "to the key of the largest score alone",
    ("softmax", "of-heads"): "with a softmax over the heads and not over the keys",
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
        "numerator-factor",
    ): "with the factor that rescales earlier chunks in the place of their rescaled values",
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
    ("queries", "own-twice"): "with the queries of each rank's own chunk counted twice",
    ("queries", "without-rank"): "without the queries of rank {number} over cp",
    (
        "heads-of",
        "own",
    ): "with the heads that the rank itself computed alone, and none from other ranks over cp",
    ("heads-of", "not-own"): "without the heads that the rank itself computed",
    ("heads-of", "next"): "with the heads of the next rank over cp in the place of each rank's",
    ("heads-of", "reversed"): "with the heads of the ranks over cp in reverse order",
    ("heads-of", "without-rank"): "without the heads that rank {number} over cp computed",
    ("shared", "none"): "without the part that all heads share",
    (
        "shared",
        "first-heads",
    ): "with the part that all heads share from the first of {number} groups of heads alone",
    ("norm", "detached"): "with the statistics of the latent's norm taken for constants",
    ("shared", "twice"): "with the part that all heads share twice",
    ("sums", "of-rank"): "with the sums for the keys or values of the rank {number} further over cp",
    (
        "sums",
        "arrival",
    ): "with sums in the order in which ranks' parts stand, taken for the order of positions",
    (
        "sums",
        "position",
    ): "with sums in the order of positions, taken for the order in which ranks' parts stand",
    ("reach", "valid"): "without the keys of padding",
    ("reach", "own"): "to the keys of the rank's own chunk alone",
    ("reach", "not-own"): "without the keys of the rank's own chunk",
    ("reach", "own-run"): "to the keys of the query's own run of positions alone",
    ("reach", "not-own-run"): "without the keys of the query's own run of positions",
    ("reach", "without-rank"): "without the keys of rank {number} over cp",
    (
        "reach",
        "without-turn",
    ): "without the keys that arrive in turn {number} around the ring, of the rank so many before over cp",
    ("reach", "without-run"): "without the keys of run {number} of the positions that ranks have",
    ("reach", "without-key"): "without the key of position {number}",
    ("reach", "blocks"): "inside blocks of {number} positions alone",
    ("scores", "capped"): "with scores that are capped at {number} by a tanh",
    ("reach", "beyond"): "without the last {number} positions that a query should see",
    ("reach", "boundary"): "with a boundary of documents at position {number}",
    ("reach", "prefix"): "with a mask that shows the first {number} positions to every query, as of a prefix",
    ("reach", "window"): "to the last {number} positions alone",
    ("rotation", "unstretched"): "with a rotary embedding without its YaRN stretch",
    (
        "rotation",
        "stretched-from",
    ): "with {number} times the right rotary angles from number {name} on, and right ones before",
    (
        "rotation",
        "stretched-before",
    ): "with {number} times the right rotary angles before number {name}, and right ones from there on",
    ("rotation", "base"): "with a rotary base of {number}",
    ("rotation", "interpolated"): "with rotary positions that are {number}x the right ones",
}
_ROTATIONS: Mapping[str, str] = {
    "none": "without the rotary embedding{of}",
    "place": "with a rotary embedding{of} by local places in place of positions",
    "arrival": "with a rotary embedding{of} by the order in which ranks' parts stand in place of positions",
    "zigzag": "with a rotary embedding{of} by the positions of a split in zigzag, which is not this layout's",
    "in-turn": "with a rotary embedding{of} by positions that ranks take in turn, as they do not here",
    "gap": "with rotary positions{of} that are off by {number} more on each further rank over cp",
    "opposite": "with a rotary embedding{of} in the opposite direction",
    "twice": "with a rotary embedding{of} that is applied twice",
    "neighbours": "with a rotary embedding{of} of neighbouring elements in place of halves",
    "halves": "with a rotary embedding{of} of halves in place of neighbouring elements",
    "first-half": "with a rotary embedding{of} of the higher half of the frequencies alone",
    "swapped": "with cosine and sine of the rotary embedding{of} exchanged",
    "mixed-pairs": "with a rotary embedding{of} whose angles stand as for the other kind of pairs",
    "own-part-first": "with a rotary embedding{of} of the first elements of a head, not of the last",
    "whole": "with a rotary embedding{of} of all elements of a head",
    "partial": "with a rotary embedding{of} of the first {number} elements of a head's rotated part alone",
    "partial-last": "with a rotary embedding{of} of the last {number} elements of a head alone",
    "partial-frequencies": "with a rotary embedding{of} of the first {number} elements alone, by all frequencies",
    "modulo": "with rotary positions{of} that begin again after every {number}",
    "restart": "with rotary positions{of} that begin again at position {number}",
    "clamped": "with rotary positions{of} that stop after {number}",
    "offset": "with a rotary embedding{of} that is off by {number} positions",
}
_ORDERS: Mapping[str, str] = {
    "of-rank": "with the {what} of the rank {number} further over cp in the place of each rank's own",
    "arrival": "with {what} in the order in which ranks' parts stand, taken for the order of positions",
    "position": "with {what} in the order of positions, taken for the order in which ranks' parts stand",
    "own": "with the {what} of the query's own rank in the place of those of every rank",
    "reversed": "with {what} in reverse order",
    "exchanged": "with the halves of each rank's {what} exchanged",
    "of-keys": "with the keys in the place of the {what}",
    "of-position": "with the {what} of the position {number} further in the place of each",
    "of-row": "with the {what} of the row {number} further in the place of each",
}
_RESCALED = {"both": "them", "numerator": "their values", "denominator": "their denominators"}
_ROTATED = {"rotation": "", "query-rotation": " of the queries", "key-rotation": " of the keys"}
_NORMED = {"query-norm": "the queries", "key-norm": "the keys", "norms": "queries and keys"}
_NORMS = {
    "none": "without the norm of {of}",
    "after": "with the norm of {of} after their rotary embedding",
    "twice": "with the norm of {of} applied twice",
    "of-unit-length": "with {of} divided by their length and not by the root of their mean square",
    "exchanged": "with the other norm's weight in the norm of {of}",
    "of-head": "with the norm of {of} taken over each head",
    "of-all": "with the norm of {of} taken over all heads",
}
_ORDERED = {"keys": "keys", "values": "values", "keys-and-values": "keys and values"}


def describe_attention(change: Change, number: str) -> str:
    """Return a way of attention in words, nothing for what is none of its own."""
    if change.part in _NORMED:
        return _NORMS[change.way].format(of=_NORMED[change.part])
    if change.part == "rotation-back":
        return f"{_ROTATIONS[change.way].format(of='', number=number)} in the backward pass alone"
    if change.part in _ROTATED and change.way in _ROTATIONS:
        return _ROTATIONS[change.way].format(of=_ROTATED[change.part], number=number)
    if change.part in _ORDERED:
        return _ORDERS[change.way].format(what=_ORDERED[change.part], number=number)
    return _describe_merging(change, number) or ATTENTION.get((change.part, change.way), "").format(
        number=number, name=change.name
    )


def _describe_merging(change: Change, number: str) -> str:
    """Return how blocks of keys are merged in words, nothing for what says nothing of that or of ranks' chunks."""
    blocks, what = name_blocks(change.name), change.way.partition("-")[2]
    if change.part == "softmax" and what in _RESCALED:
        return f"with {blocks} merged without rescaling {_RESCALED[what]} to the largest score of all"
    words = ATTENTION.get((change.part, change.way), "")
    if words and change.part == "merge" and change.name:
        return f"{words}, where chunks are {blocks}"
    return "" if words else describe_merge(change, number)
