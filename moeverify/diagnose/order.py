"""In which order hypotheses are tried, and which of what finds causes is left out. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from moeverify.errors import CaseError, Problem

ORDER = (
    ("reordered", "stale_counts"),
    ("stale_weights", "later_micro_batch"),
    ("unwritten",),
    ("not_loaded", "unmoved"),
    ("step_counter",),
    ("carried_state",),
    ("another_slot",),
    (
        "detached",
        "replica_sum",
        "unclipped",
        "norm_squares",
        "norm_of_partials",
        "clip_formula",
        "another_term",
    ),
    ("loss_formula", "reported_average"),
    (
        "one_factor",
        "held_sum",
        "loss_terms",
        "router_terms",
        "tied_uses",
        "other_scope",
        "batch_shares",
        "padding",
        "share_terms",
        "added_values",
        "misreduced",
    ),
    ("token_weights",),
    ("scaled_by_shape",),
    ("gradient_norm", "scaled_values", "bias_rule"),
    ("another_layer",),
    ("previous_value", "permutation", "moved_tokens", "shifted_read"),
    ("another_tensor",),
    ("lost_elements",),
    ("block_sum", "block_factors", "wrong_tokens", "unmasked"),
    ("block_shares",),
    ("crossed_sums", "other_micro_batch"),
    ("reweighted_rows",),
    ("returned_rows",),
    ("noisy_factor", "noisy_sum"),
    ("scaled_loss", "other_router_loss"),
    ("loss_value",),
    ("repeated_shard", "counted_padding", "counted_others"),
    ("rounding",),
    ("drawn", "tails"),
    ("own_values", "altered"),
)

EXPLAIN = "explain"
"""The search for the first wrong operation."""

MECHANISMS = (*(name for tier in ORDER for name in tier), EXPLAIN)

_left_out: ContextVar[frozenset[str]] = ContextVar("_left_out", default=frozenset())


@contextmanager
def leaving_out(names: Iterable[str]) -> Iterator[None]:
    """Try none of the hypotheses of these names while the block runs."""
    token = _left_out.set(frozenset(names))
    try:
        yield
    finally:
        _left_out.reset(token)


def is_left_out(name: str) -> bool:
    """Return whether a hypothesis is not to be tried."""
    return name in _left_out.get()


def choose_left_out(without: Collection[str], only: Collection[str]) -> tuple[str, ...]:
    """Return the mechanisms to leave out: those of `without`, or with `only` all others.

    Raises CaseError for names that are none, and where both are given.
    """
    problems = [
        Problem(f"no mechanism `{name}`", option, remedy=f"the mechanisms are {', '.join(MECHANISMS)}")
        for option, names in (("--without", without), ("--only", only))
        for name in names
        if name not in MECHANISMS
    ]
    if without and only:
        problems.append(Problem("cannot be given beside --only", "--without", remedy="give one of the two"))
    if problems:
        raise CaseError(problems)
    return tuple(name for name in MECHANISMS if name in without or (only and name not in only))
