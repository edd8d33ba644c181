"""Order of the hypotheses, and exclusion of some of them. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ORDER = (
    ("reordered",),
    ("stale_weights",),
    ("not_loaded", "unmoved"),
    ("step_counter",),
    ("carried_state",),
    (
        "detached",
        "replica_sum",
    ),
    (
        "one_factor",
        "loss_terms",
        "batch_shares",
        "share_terms",
    ),
    ("gradient_norm",),
    ("previous_value", "permutation", "shifted_read"),
    ("another_tensor",),
    ("rounding",),
    ("own_values", "altered"),
)

EXPLAIN = "explain"
"""Name of the search for the first wrong operation."""

MECHANISMS = (*(name for tier in ORDER for name in tier), EXPLAIN)

_left_out: ContextVar[frozenset[str]] = ContextVar("_left_out", default=frozenset())


@contextmanager
def leaving_out(names: Iterable[str]) -> Iterator[None]:
    """Exclude the hypotheses with these names while the block runs."""
    token = _left_out.set(frozenset(names))
    try:
        yield
    finally:
        _left_out.reset(token)


def is_left_out(name: str) -> bool:
    """Return whether a hypothesis is excluded."""
    return name in _left_out.get()
