"""Sizes of a model: guessed from their names, and reduced until few parameters are left. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Sizes = dict[str, int]
Measure = Callable[[Sizes], int | None]

_LARGE = 64
_LEAST_WIDTH, _LEAST_EXPERTS, _LEAST = 32, 8, 2
_EXPERTS = re.compile("expert", re.IGNORECASE)
# Few experts a token, or each token would go to all that are left, and its routing could not be wrong.
_CHOSEN = re.compile("top_?k|per_tok", re.IGNORECASE)

# A size for each name that authors leave open. The first pattern that is found counts.
_GUESSES = (
    (_CHOSEN, 2),
    (_EXPERTS, _LEAST_EXPERTS),
    (re.compile("vocab|num_tokens|n_tokens", re.IGNORECASE), _LARGE),
    (re.compile("kv_head|query_group", re.IGNORECASE), 2),
    (re.compile("seq|ctx|context|block_size|position|max_len", re.IGNORECASE), _LARGE),
    (re.compile("image|img|class", re.IGNORECASE), _LARGE),
    (re.compile("patch", re.IGNORECASE), _LEAST_EXPERTS),
    (re.compile("head_?(dim|size)|d_head|dim_head", re.IGNORECASE), _LEAST_WIDTH // 2),
    (re.compile("head|layer|depth|n_?blocks", re.IGNORECASE), 2),
    (re.compile("dim|width|emb|hidden|d_model|d_ff|intermediate|channel", re.IGNORECASE), _LARGE),
)


def guess_size(name: str) -> int | None:
    """Return a small size for a field of this name, or None if the name does not sound like a size."""
    return next((size for pattern, size in _GUESSES if pattern.search(name)), None)


def shrink(sizes: Mapping[str, int], measure: Measure, budget: int) -> Sizes:
    """Return the sizes to change, with their new values, so that the model has at most `budget` parameters.

    `measure` returns the number of parameters under changed sizes, or None if no such model works. All
    sizes become powers of two first, since heads divide widths, and groups divide experts. Then the size
    that saves most is halved until the budget holds. A change that saves nothing is taken back.
    """
    whole = measure({})
    if whole is not None and whole <= budget:
        return {}
    rounded = {name: _round(name, value) for name, value in sizes.items() if _round(name, value) < value}
    large = {name: value for name, value in rounded.items() if sizes[name] > _LARGE}
    changes = next((each for each in (rounded, large) if each and measure(each) is not None), {})
    cost = measure(changes)
    while cost is None or cost > budget:
        smaller = _halve_best(sizes, changes, measure, cost)
        if smaller is None:
            break
        changes, cost = smaller
    for name in list(changes):
        others = {other: value for other, value in changes.items() if other != name}
        if not _CHOSEN.search(name) and measure(others) == cost:
            changes = others
    return changes


def _halve_best(
    sizes: Mapping[str, int], changes: Sizes, measure: Measure, cost: int | None
) -> tuple[Sizes, int] | None:
    """Return the changes with the size halved that saves most, and the cost; None if none saves anything."""
    best: tuple[Sizes, int] | None = None
    for name, value in sizes.items():
        half = changes.get(name, value) // 2
        if half < _find_least(name, value):
            continue
        tried = {**changes, name: half}
        found = measure(tried)
        least = cost if best is None else best[1]
        if found is not None and (least is None or found < least):
            best = tried, found
    return best


def _round(name: str, value: int) -> int:
    """Return the first smaller value to try: 64 for widths and vocabularies, a quarter of small counts."""
    power = 1 << (value.bit_length() - 1) if value > 0 else value
    if _CHOSEN.search(name):
        return min(value, _LEAST)
    if value > _LARGE and not _EXPERTS.search(name):
        return _LARGE
    return max(power // 4, min(value, _find_least(name, value)))


def _find_least(name: str, value: int) -> int:
    if _EXPERTS.search(name) and not _CHOSEN.search(name):
        return _LEAST_EXPERTS
    return _LEAST_WIDTH if value > _LARGE else _LEAST
