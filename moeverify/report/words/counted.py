"""Which tokens count for the gradient of a parameter, and how often, in words."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.change import Change

_OF_CALL: Mapping[str, tuple[str, str, str]] = {
    "tokens": ("tokens", "token", "each call"),
    "expert-rows": ("rows", "row", "each expert in a call"),
}
_COUNTED: Mapping[str, str] = {
    "without-row": "without the tokens of row {number} of {call}",
    "only-row": "with the tokens of row {number} of {call} alone",
    "first-rows": "with the tokens of the first {number} rows of {call} alone",
    "without-first-rows": "without the tokens of the first {number} rows of {call}",
    "every-row": "with one row in {number} of {call} alone",
    "without-position": "without the tokens at position {number} of {call}",
    "only-position": "with the tokens at position {number} of {call} alone",
    "first-positions": "with the tokens at the first {number} positions of {call} alone",
    "without-first-positions": "without the tokens at the first {number} positions of {call}",
    "every-position": "with one position in {number} of {call} alone",
    "without-last": "without the last {counted} of {call}",
    "without-first": "without the first {counted} of {call}",
    "first-alone": "with the first {counted} of {call} alone",
    "last-alone": "with the last {counted} of {call} alone",
    "first-twice": "with the first {counted} of {call} twice",
    "last-twice": "with the last {counted} of {call} twice",
    "every": "with one {one} in {number} of {call} alone",
    "without-every": "without one {one} in {number} of {call}",
    "chunk-alone": "with part {number} of {name} equal parts of the {many} of {call} alone",
    "without-chunk": "without part {number} of {name} equal parts of the {many} of {call}",
    "last-times": "with the last {one} of {call} {number} times",
    "whole-tiles": "with whole blocks of {number} {many} of {call} alone, without what is left over",
    "filled-with-last": "with the last {one} of {call} so often that the last block of {number} is full",
    "filled-with-first": "with the first {many} of {call} once more, so that the last block of {number} is full",
    "mean": "with the mean over the {many} of {call} in place of their sum",
    "without-padding": "without padding",
    "padding-alone": "with padding alone",
}
_OCCURRENCES: Mapping[str, str] = {
    "last-alone": "with the last token of each call alone that looked up a row",
    "first-alone": "with the first token of each call alone that looked up a row",
    "mean": "with the mean over the tokens of each call that looked up a row in place of their sum",
    "without-first": "without the first token of each call that looked up a row",
    "without-last": "without the last token of each call that looked up a row",
    "first-ones": "with the first {number} tokens of each call alone that looked up a row",
    "last-alone-in-tiles": "with the last token alone of each block of {number} that looked up a row",
    "first-alone-in-tiles": "with the first token alone of each block of {number} that looked up a row",
}
_OTHERS: Mapping[tuple[str, str], str] = {
    ("result", "transposed"): "and stores it transposed",
    ("result", "reversed"): "and stores its last dim in reverse order",
    ("input", "of-micro-batch-before"): "with the input of the micro-batch before, in each after the first",
    ("input", "of-micro-batch-after"): "with the input of the micro-batch after, in each before the last",
    (
        "input",
        "of-micro-batch-before-around",
    ): "with the input of the micro-batch before, of the last in the first",
    (
        "input",
        "of-micro-batch-after-around",
    ): "with the input of the micro-batch after, of the first in the last",
    ("input", "of-first-micro-batch"): "with the input of the first micro-batch in all of them",
    ("input", "of-last-micro-batch"): "with the input of the last micro-batch in all of them",
    ("where", "micro-batch"): "in micro-batch {number} alone",
}


def describe_counted(change: Change, number: str) -> str:
    """Return which tokens count for the gradient of a parameter; nothing for what is no such change."""
    part, way = change.part, change.way
    if (part, way) == ("where", "calls-of-ranks"):
        return f"on rank{'s' if ',' in change.name else ''} {change.name.replace(',', ', ')} alone"
    if part == "occurrences":
        return _OCCURRENCES[way].format(number=number)
    if part not in _OF_CALL:
        return _OTHERS.get((part, way), "").format(number=number)
    many, one, call = _OF_CALL[part]
    most = f" to {change.name}" if change.name else ""
    counted = one if number + most == "1" else f"{number}{most} {many}"
    return _COUNTED[way].format(
        number=number, name=change.name, many=many, one=one, call=call, counted=counted
    )
