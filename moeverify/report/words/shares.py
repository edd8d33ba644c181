"""Sentences about the weights with which shares of the batch are summed."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.factor import describe_factor
from moeverify.results.operation import OwnTokens, Scaled

_OWN_TOKENS: Mapping[OwnTokens, str] = {
    "times": "multiplied by its own number of valid tokens",
    "divided": "divided by its own number of valid tokens once more",
    "share": "multiplied by its own number of valid tokens over the mean of all shards",
    "of-largest": "multiplied by its own number of valid tokens over the largest of all shards",
    "largest-over": "multiplied by the largest number of valid tokens of all shards over its own",
    "root": "multiplied by the root of its own number of valid tokens over the mean of all shards",
}


def describe_weights(operation: Scaled) -> str:
    """Return the rule for the weights of the batch's shares, if it is known."""
    terms = [term for term in dict.fromkeys(each.part.term for each in operation.contributions) if term]
    about = f" in the {' and the '.join(terms)} loss" if terms else ""
    scale = "" if operation.means_factor is None else f", {describe_factor(operation.means_factor)}"
    if operation.own_tokens is not None:
        part = f"the part of the {' and the '.join(terms)} loss" if terms else "the gradient"
        return f"{part} of each data shard is {_OWN_TOKENS[operation.own_tokens]}"
    return (
        f"mean of means{about}: each of the {operation.local_means} data shards is divided by its own number of "
        f"valid tokens{scale}"
    )
