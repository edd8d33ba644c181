"""Results of a guarded run, which needs no other run to compare with, as data. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from moeverify.results.record import Record
from moeverify.results.script import NormFacts


class GuardCheck(StrEnum):
    """The checks of `moeverify watch --guard` that `moeverify compare` does not have."""

    REPLICAS = "replicas"  # ranks with the same region of a tensor hold equal values
    EXPERTS = "experts"  # every expert starts with its own values
    TOKENS = "tokens"  # data-parallel ranks see different rows
    SAME_WORK = "same work"  # no ranks with equal rows and weights run without communication
    NORM = "gradient norm"  # the norm of the clip is the norm of the gradients
    UPDATE = "update"  # the update follows from the optimizer's options, gradient and moments
    COLLECTIVES = "collectives"  # ranks of a group issue the same collectives in the same order
    FINITE = "finite values"  # losses, gradients and outputs are finite


class DriftCause(Record):
    """Why replicas differ after a step.

    - `option`: the optimizers of the two `ranks` have other `values` of `option`, set at `site`.
    - `schedule`: the same, and their schedulers step a different number of times, `counts`, in a step.
    - `write`: something else than the optimizer's step has changed the tensors on `ranks`.
    - `overwrite`: the tensors are equal, as values of rank `ranks` replace others after each step.
    - `rows`: `ranks` add up activations in the forward pass and have different rows.
    - `forward`: ranks with equal rows have other losses; the output of `module` is the first that differs.
    - `backward`: ranks with equal rows have equal losses; the gradient of `module` differs.
    - `local`: the same, and the output of `module` is the first that differs.
    - `parts`: the same with equal outputs, and gradients of earlier modules are equal, or `module` has tensors
      that began with other values.
    - `sequence`: ranks with equal rows compute a part of the positions in `module`, `counts[0]` of `counts[1]`;
      `is_ambiguous` if their losses differ, so that a gather may be missing instead of a sum.
    """

    kind: Literal[
        "option",
        "schedule",
        "write",
        "overwrite",
        "rows",
        "forward",
        "backward",
        "local",
        "parts",
        "sequence",
    ]
    option: str = ""
    values: tuple[float, float] = (0.0, 0.0)
    counts: tuple[int, int] = (0, 0)
    ranks: tuple[int, ...] = ()
    site: str = ""
    module: str = ""
    is_ambiguous: bool = False


class DriftFacts(Record):
    """Tensors that should be equal on some ranks and are not.

    `since` is `start` if they started unequal, otherwise `update`. `gradients`
    compares the gradients of that step on these ranks; `clipped apart` means equal norms before the clip
    and unequal ones after it. `distance` is relative to the norm of the values, estimated from samples.
    `are_experts` means that every FQN contains `expert`. `groups` are ranks with equal gradients, if some have.
    """

    about: Literal["drift"] = "drift"
    names: tuple[str, ...]
    since: Literal["start", "update"]
    gradients: Literal["equal", "differ", "clipped apart", "unknown"]
    distance: float
    are_experts: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    cause: DriftCause | None = None


class AlikeFacts(Record):
    """Experts of one rank that start with equal values: `num_alike` of `num_experts` in each of `names`."""

    about: Literal["alike"] = "alike"
    names: tuple[str, ...]
    num_alike: int
    num_experts: int


class TokenFacts(Record):
    """Rows that two data-parallel ranks both saw, in one optimizer step or `shift` forward passes apart.

    `num_steps` is the number of consecutive sampled steps with shared rows, or of shifted forward passes.
    """

    about: Literal["tokens"] = "tokens"
    num_rows: int
    num_shared: int
    num_steps: int
    shift: int = 0


class SameWorkFacts(Record):
    """Ranks that saw the same rows with the same weights, and did not communicate in any sampled step."""

    about: Literal["same work"] = "same work"
    axis: str
    num_tensors: int
    num_steps: int


class OwnNormFacts(Record):
    """A gradient norm that does not equal the norm of the ranks' gradients.

    `source` is the evidence: the value that torch's clip returned (`norm`), coefficients that differ
    between ranks (`ranks`), or coefficients of several steps that no constant limit explains
    (`coefficient`). `error` describes the wrong count, if known.
    """

    about: Literal["own norm"] = "own norm"
    source: Literal["norm", "coefficient", "ranks"]
    error: NormFacts


class NonfiniteFacts(Record):
    """The first value that is NaN or infinite: in a module output, the loss, a gradient or a weight."""

    about: Literal["nonfinite"] = "nonfinite"
    what: Literal["output", "loss", "gradient", "weight"]
    module: str = ""
