"""Causes that a diagnosis can name. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Cause(StrEnum):
    """The reason why a logical tensor differs from its golden. The values are the codes in JSON."""

    description: str

    def __new__(cls, value: str, description: str = "") -> Self:
        """Create a member equal to `value`, with the description that `moeverify explain CODE` shows."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member

    DATA = "data", "a rank reads tokens, labels, positions or masks of another share"
    SCALE = "scale", "every value of a family is k times the expected one"
    TERM_SCALE = (
        "term-scale",
        "the part of one loss term (lm, balance, z) is k times the expected one; k = 0: missing",
    )
    SHARE_WEIGHTS = "share-weights", "shares of ranks or micro-batches have wrong weights or are missing"
    PADDING = "padding", "padding tokens contribute"
    MISSING_REDUCTION = "missing-reduction", "replicas over a mesh axis hold unreduced partial sums"
    DETACHED = "detached", "zero or absent although the golden is nonzero"
    PERMUTATION = "permutation", "correct values in wrong positions"
    DUPLICATE = "duplicate", "one part holds the values of another part"
    MISSING = "missing", "no rank has this parameter or buffer of the model"
    STALE = "stale", "the value of an earlier step: not updated, or not refreshed"
    NOT_LOADED = "not-loaded", "unchanged by a checkpoint load"
    NORM = "norm", "the gradients are correct, but their norm or the clip is not"
    CALLS = "calls", "a user's own step calls zero_grad, clip or the scheduler at the wrong point"
    OPTIMIZER = "optimizer", "moments or update do not follow from the rank's own gradient, state and options"
    STATE = "state", "router state or counters do not change as the correct gradients and routing imply"
    CARRIED_STATE = (
        "carried-state",
        "a step begins with moments that the previous step did not leave: reset, or moved",
    )
    METRIC = "metric", "only a reported number is off, by a factor that is named"
    ROUNDING = "rounding", "right up to the rounding of a lower precision than the recipe's"
    PRECISION = "precision", "a part computes, reduces or is kept in another dtype than the recipe asks for"
    ROUTING = "routing", "tokens went to other experts although their router's inputs are right"
    FORWARD = "forward", "a module's output is wrong although its inputs are right"
    BACKWARD = "backward", "a gradient is wrong from a module on, and no linear combination explains it"
    REPLICAS = "replicas", "ranks that should hold the same do not"
    LAYOUT = "layout", "an axis that should divide something divides nothing"
    COLLECTIVES = "collectives", "ranks of one group issue different ones, or for different tensors"
    NONDETERMINISM = "nondeterminism", "two runs of the same layout differ"
