"""The hypotheses, one file each, in the order in which they are tried: from simple to complex.

What stands in one tier is tested together: on all wrong tensors, then on families, then on each alone, as far as a
hypothesis asks for that. What a tier explains no later one sees. To add a hypothesis, write its file with a
`HYPOTHESIS` in it and give its name a place here; words for a new operation or observation are in
`moeverify.report.words`.
"""

from __future__ import annotations

from importlib import import_module

from moeverify.diagnose.hypotheses.base import Hypothesis

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

TIERS: tuple[tuple[Hypothesis, ...], ...] = tuple(
    tuple(import_module(f"{__name__}.{name}").HYPOTHESIS for name in tier) for tier in ORDER
)
