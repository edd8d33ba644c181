"""Selection of cases by `-k`, such as `fsdp and not (cp or tp)`. Each word is a part of a case name."""

from __future__ import annotations

import re
from collections.abc import Callable

Match = Callable[[str], bool]

_TOKEN = re.compile(r"\s*(?:(?P<bracket>[()])|(?P<word>[^\s()]+))")


class PatternError(ValueError):
    """An invalid pattern. The text is the reason."""


def compile_pattern(pattern: str) -> Match:
    """Return a predicate on case names for `pattern`. Ignores case.

    `compile_pattern("fsdp and not cp")` matches `fsdp2-ep2` and not `fsdp-cp-ep`.

    Raises: PatternError when the pattern is invalid.
    """
    tokens = [found.group("bracket") or found.group("word") for found in _TOKEN.finditer(pattern)]
    if not tokens:
        raise PatternError("the pattern is empty")
    match, rest = _read_any(tokens)
    if rest:
        raise PatternError(f"expected `and`, `or` or the end, got `{rest[0]}`")
    return match


def _read_any(tokens: list[str]) -> tuple[Match, list[str]]:
    left, rest = _read_all(tokens)
    while rest and rest[0].lower() == "or":
        right, rest = _read_all(rest[1:])
        left = _either(left, right)
    return left, rest


def _read_all(tokens: list[str]) -> tuple[Match, list[str]]:
    left, rest = _read_one(tokens)
    while rest and rest[0].lower() == "and":
        right, rest = _read_one(rest[1:])
        left = _both(left, right)
    return left, rest


def _read_one(tokens: list[str]) -> tuple[Match, list[str]]:
    if not tokens:
        raise PatternError("expected a word, got the end")
    head, rest = tokens[0].lower(), tokens[1:]
    if head == "not":
        inner, rest = _read_one(rest)
        return (lambda name: not inner(name)), rest
    if head == "(":
        inner, rest = _read_any(rest)
        if not rest or rest[0] != ")":
            raise PatternError("a `(` is not closed")
        return inner, rest[1:]
    if head in {"and", "or", ")"}:
        raise PatternError(f"expected a word, got `{tokens[0]}`")
    return (lambda name: head in name.lower()), rest


def _either(left: Match, right: Match) -> Match:
    return lambda name: left(name) or right(name)


def _both(left: Match, right: Match) -> Match:
    return lambda name: left(name) and right(name)
