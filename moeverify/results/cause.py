"""The causes that a diagnosis can name. No torch."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a logical tensor differs from its golden."""

    DATA = "data"  # ranks read other tokens, labels, positions or masks than are theirs
    SCALE = "scale"  # every value of a family is k times the right one
    TERM_SCALE = (
        "term-scale"  # the part of one loss term (lm, balance, z) is k times the right one; 0: it is missing
    )
    SHARE_WEIGHTS = "share-weights"  # shares of ranks or micro-batches are weighted otherwise, or missing
    PADDING = "padding"  # padding tokens contribute
    MISSING_REDUCTION = "missing-reduction"  # replicas over an axis hold unreduced partial sums
    DETACHED = "detached"  # zero or absent where the golden is not
    PERMUTATION = "permutation"  # the right values in other places
    DUPLICATE = "duplicate"  # a part holds the values of another part
    MISSING = "missing"  # no rank has a parameter or buffer of the model
    STALE = "stale"  # the value of an earlier step: not updated, or not refreshed
    NOT_LOADED = "not-loaded"  # after a load it has the value that it had before
    NORM = "norm"  # the gradients are right, the norm or the clip by it is not
    CALLS = "calls"  # a user's own step calls zero_grad, clip or scheduler at the wrong place
    OPTIMIZER = "optimizer"  # moments or update do not follow from the rank's own gradient, state and options
    STATE = (
        "state"  # router state or counters moved by another amount than the right gradients and routing say
    )
    CARRIED_STATE = (
        "carried-state"  # a step began with other moments than the one before left: reset, or moved
    )
    METRIC = "metric"  # only a reported number is off, by a factor that is named
    ROUNDING = "rounding"  # right up to the rounding of a lower precision than the recipe's
    PRECISION = "precision"  # a part computes, reduces or is kept in another dtype than the recipe asks for
    ROUTING = "routing"  # tokens went to other experts although what came before is right
    FORWARD = "forward"  # a module's output is wrong although its inputs are right
    BACKWARD = "backward"  # a gradient is wrong from a module on, and no linear combination explains it
    REPLICAS = "replicas"  # ranks that should hold the same do not
    LAYOUT = "layout"  # an axis that should divide something divides nothing
    COLLECTIVES = "collectives"  # ranks of one group issue different ones, or for different tensors
    NONDETERMINISM = "nondeterminism"  # two runs of the same layout differ
