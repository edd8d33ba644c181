"""Sentences about the weights with which shares of the batch are summed."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.factor import describe_factor
from moeverify.results.operation import ByNumber, OwnTokens, PartialClip, Scaled

_OWN_TOKENS: Mapping[OwnTokens, str] = {
    "times": "multiplied by its own number of valid tokens",
    "divided": "divided by its own number of valid tokens once more",
    "share": "multiplied by its own number of valid tokens over the mean of all shards",
    "of-largest": "multiplied by its own number of valid tokens over the largest of all shards",
    "largest-over": "multiplied by the largest number of valid tokens of all shards over its own",
    "root": "multiplied by the root of its own number of valid tokens over the mean of all shards",
}


def describe_weights(operation: Scaled) -> str:
    """Return how the wrong weights of the batch's shares were computed, if known."""
    if operation.clip is not None:
        return _describe_clip(operation.clip)
    if operation.by_number is not None:
        return _describe_by_number(operation.by_number)
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


def _describe_by_number(by_number: ByNumber) -> str:
    if by_number.way == "divided":
        return "each micro-batch is divided by how many there were up to it, as in a running mean"
    if by_number.way == "times":
        return "each micro-batch counts as often as there were micro-batches up to it"
    if by_number.way == "falling":
        return f"each micro-batch counts {by_number.ratio:.6g} times as much as the one before it"
    return f"what micro-batches have left is multiplied by {by_number.ratio:.6g} before each micro-batch is added"


def _describe_clip(clip: PartialClip) -> str:
    who, whose = ("each rank", "its own") if clip.by_own else ("all ranks together", "their")
    if clip.clipped == "accumulated":
        return f"gradients are clipped after each micro-batch, by the norm of what {who} had by then"
    return f"gradients are clipped before they are summed: {who} by the norm of {whose} micro-batch"
