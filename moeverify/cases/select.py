"""Selection of cases by `-k`, such as `fsdp and not (cp or tp)`. Each word is a part of a case name."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from moeverify.errors import CaseError, Problem

Match = Callable[[str], bool]

_MOST_DEEP = 50
_TOKEN = re.compile(r"\s*(?:(?P<bracket>[()])|(?P<word>[^\s()]+))")


class PatternError(ValueError):
    """An invalid pattern. The text is the reason."""


def compile_pattern(pattern: str) -> Match:
    """Return a predicate on case names for `pattern`. Ignores case.

    `compile_pattern("fsdp and not cp")` matches `fsdp2-ep2` and not `fsdp-cp-ep`.

    Raises: PatternError when the pattern is invalid.
    """
    tokens = deque(found.group("bracket") or found.group("word") for found in _TOKEN.finditer(pattern))
    if not tokens:
        raise PatternError("the pattern is empty")
    match = _read_any(tokens, 0)
    if tokens:
        raise PatternError(f"expected `and`, `or` or the end, got `{tokens[0]}`")
    return match


def read_pattern(pattern: str | None) -> Match:
    """Return the predicate of the option `-k`; without the option, every name matches.

    Raises: CaseError when the pattern is invalid.
    """
    if pattern is None:
        return lambda name: True
    try:
        return compile_pattern(pattern)
    except PatternError as error:
        remedy = "write for example `fsdp and not (cp or tp)`"
        raise CaseError(
            [Problem(f"`{pattern}` cannot be read: {error}", path="-k", remedy=remedy)]
        ) from error


def _read_any(tokens: deque[str], depth: int) -> Match:
    parts = [_read_all(tokens, depth)]
    while _take(tokens, "or"):
        parts.append(_read_all(tokens, depth))
    return lambda name: any(part(name) for part in parts)


def _read_all(tokens: deque[str], depth: int) -> Match:
    parts = [_read_one(tokens, depth)]
    while _take(tokens, "and"):
        parts.append(_read_one(tokens, depth))
    return lambda name: all(part(name) for part in parts)


def _read_one(tokens: deque[str], depth: int) -> Match:
    is_wanted = True
    while _take(tokens, "not"):
        is_wanted = not is_wanted
    if _take(tokens, "("):
        if depth == _MOST_DEEP:
            raise PatternError(f"more than {_MOST_DEEP} `(` inside each other")
        inner = _read_any(tokens, depth + 1)
        if not _take(tokens, ")"):
            raise PatternError("a `(` is not closed")
        return lambda name: inner(name) is is_wanted
    if not tokens:
        raise PatternError("expected a word, got the end")
    word = tokens.popleft().lower()
    if word in {"and", "or", ")"}:
        raise PatternError(f"expected a word, got `{word}`")
    return lambda name: (word in name.lower()) is is_wanted


def _take(tokens: deque[str], token: str) -> bool:
    """Remove the next token if it is this one, and return whether it was."""
    is_next = bool(tokens) and tokens[0].lower() == token
    if is_next:
        tokens.popleft()
    return is_next
