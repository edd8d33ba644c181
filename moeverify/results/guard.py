"""What a guarded run finds by itself, without a run to compare with, as data. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from moeverify.results.record import Record
from moeverify.results.script import NormFacts


class GuardCheck(StrEnum):
    """The checks of `moeverify watch --guard` that `moeverify compare` has not."""

    REPLICAS = "replicas"  # ranks that hold the same region of a tensor have the same values
    EXPERTS = "experts"  # experts begin with values of their own
    TOKENS = "tokens"  # data-parallel ranks see different rows
    SAME_WORK = "same work"  # ranks with the same rows and weights that never communicate
    NORM = "gradient norm"  # the norm that clips is that of the gradients
    UPDATE = "update"  # the update is what the optimizer's options make of gradient and moments
    COLLECTIVES = "collectives"  # ranks of a group issue the same ones in the same order
    FINITE = "finite values"  # losses, gradients and outputs are finite


class DriftFacts(Record):
    """Tensors that should be equal on some ranks and are not.

    `since` is `start` where they began unequal although their gradients are equal, else `update`. `gradients` says
    whether the gradients of that step are equal on these ranks, or had equal norms before the clip and not after it.
    `distance` is that of the values relative to their norm, estimated from samples. `are_experts`: the FQN of each
    says `expert`.
    """

    about: Literal["drift"] = "drift"
    names: tuple[str, ...]
    since: Literal["start", "update"]
    gradients: Literal["equal", "differ", "clipped apart", "unknown"]
    distance: float
    are_experts: bool = False


class AlikeFacts(Record):
    """Experts of one rank that begin with the same values: `num_alike` of `num_experts` in each of `names`."""

    about: Literal["alike"] = "alike"
    names: tuple[str, ...]
    num_alike: int
    num_experts: int


class TokenFacts(Record):
    """Rows that two data-parallel ranks both saw in one optimizer step, in `num_steps` sampled steps in a row."""

    about: Literal["tokens"] = "tokens"
    num_rows: int
    num_shared: int
    num_steps: int


class SameWorkFacts(Record):
    """Ranks that saw the same rows with the same weights, and exchanged nothing in any sampled step."""

    about: Literal["same work"] = "same work"
    axis: str
    num_tensors: int
    num_steps: int


class OwnNormFacts(Record):
    """A gradient norm that is not that of the gradients which the ranks had.

    `source` says how it is known: from what a clip of torch returned (`norm`), from coefficients that differ between
    ranks (`ranks`), or from coefficients of several steps that no constant limit over the right norm gives
    (`coefficient`). `error` says what is counted wrong, as far as that is known.
    """

    about: Literal["own norm"] = "own norm"
    source: Literal["norm", "coefficient", "ranks"]
    error: NormFacts


class NonfiniteFacts(Record):
    """The first value that is NaN or infinite: in the output of a module, the loss, a gradient or a weight."""

    about: Literal["nonfinite"] = "nonfinite"
    what: Literal["output", "loss", "gradient", "weight"]
    module: str = ""
