"""Suggestions of valid names for invalid ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 24


def find_nearest(word: str, options: Iterable[str]) -> str | None:
    """Return the option closest to `word`, if any is close. Ignores case and treats `-` as `_`."""
    by_key = {_fold(option): option for option in options}
    close = difflib.get_close_matches(_fold(word), by_key, n=1, cutoff=0.6)
    return by_key[close[0]] if close else None


def suggest(word: str, options: Iterable[str]) -> str:
    """Return a suggestion for an unknown `word`: the closest option, or else the list of options."""
    names = list(dict.fromkeys(options))
    nearest = find_nearest(word, names)
    if nearest is not None:
        return f"did you mean `{nearest}`?"
    return f"choose from {enumerate_names(names)}" if names else ""


def enumerate_names(names: Iterable[str]) -> str:
    """Return `names` quoted and joined, cut off after 24 names."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) > MAX_LISTED:
        quoted = [*quoted[:MAX_LISTED], f"and {len(quoted) - MAX_LISTED} more"]
    return ", ".join(quoted)


def _fold(word: str) -> str:
    return word.strip().lower().replace("-", "_")
