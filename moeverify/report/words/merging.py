"""How what queries see of their keys block by block is merged, in words: `with ranks' chunks merged by ...`."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.change import Change

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

_ORDERS = {"in-order": " in the order of ranks", "back": ", those of the next ranks first,"}


def describe_merge(change: Change, number: str) -> str:
    """Return a rule by which blocks are merged in words, nothing for what is none."""
    words = _RULES.get(change.way, "") if change.part == "merge" else ""
    return words.format(blocks=name_blocks(change.name), number=number)


def name_blocks(name: str) -> str:
    """Return which blocks are merged, in words: those of ranks, in some order, or of so many keys."""
    return f"blocks of {name} keys" if name.isdecimal() else f"ranks' chunks{_ORDERS.get(name, '')}"
