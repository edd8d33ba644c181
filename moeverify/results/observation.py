"""Observations: the measurements on the way to a cause, one record for each kind.

A new kind is a record here, a member of `Observation`, and its line in `moeverify.report.words.observation`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moeverify.results.part import Contribution
from moeverify.results.record import Record

Direction = Literal["forward", "backward"]
End = Literal["input", "output"]


class FitResult(Record):
    """A least-squares fit of the error on parts of the expected value.

    `residual` is the share of the error that the fit leaves, in the tensor that it explains worst.
    """

    kind: Literal["fit"] = "fit"
    contributions: tuple[Contribution, ...]
    residual: float


class ReplicaSum(Record):
    """The sum of the replicas over an axis: `factor` times the expected value, where it is a multiple of that."""

    kind: Literal["replica-sum"] = "replica-sum"
    axis: str
    num_replicas: int
    factor: float | None = None
    residual: float | None = None


class LargestValue(Record):
    """The largest absolute value of a tensor, and the one expected; `absent_on` are ranks without any."""

    kind: Literal["largest-value"] = "largest-value"
    expected: float
    actual: float
    absent_on: tuple[int, ...] = ()


class ScalarValues(Record):
    """A number that has a name, such as a loss; on one rank, where ranks have values of their own."""

    kind: Literal["scalar-values"] = "scalar-values"
    name: str = ""
    expected: float
    actual: float
    rank: int | None = None


class RankValues(Record):
    """The different values of a number that all ranks should have alike."""

    kind: Literal["rank-values"] = "rank-values"
    values: tuple[float, ...]


class MatchingSlices(Record):
    """How many slices along a dim, or how many tokens, equal one of the expected ones."""

    kind: Literal["matching-slices"] = "matching-slices"
    dim: int | None
    num_matching: int
    num_slices: int


class Distance(Record):
    """How far a tensor is from the expected one at another time or of another name, as a share of that one's norm."""

    kind: Literal["distance"] = "distance"
    error: float


class RelativeError(Record):
    """The largest relative error (Frobenius norms), and units of rounding to hold it against, by dtype."""

    kind: Literal["relative-error"] = "relative-error"
    error: float
    units: dict[str, float] = Field(default_factory=dict)


class FirstDivergence(Record):
    """The first end of a module that differs, in the order of one device, and all that was right before it.

    `error` is relative, None where nothing differs. Before it, `num_right` readings are right to `worst_right`.
    `also` are the other modules that take or return the same tensor, `inside` those in the module of which all
    readings are right. `num_wrong` of `num_tokens` are wrong: tokens, or rows in an order of the module's own.
    """

    kind: Literal["first-divergence"] = "first-divergence"
    direction: Direction
    module: str = ""
    end: End = "output"
    also: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    error: float | None = None
    ranks: tuple[int, ...] = ()
    num_wrong: int = 0
    num_tokens: int = 0
    are_rows: bool = False
    num_right: int = 0
    worst_right: float = 0.0


class StaleWeights(Record):
    """Whether a module computes its wrong output from the weights that it had a step earlier."""

    kind: Literal["stale-weights"] = "stale-weights"
    gives_this_output: bool


class TriedOrders(Record):
    """How many orders of the right values were tried, and how many of them give every value."""

    kind: Literal["tried-orders"] = "tried-orders"
    num_tried: int
    num_giving: int = 0


class KeptElements(Record):
    """How many elements a load has left as they were."""

    kind: Literal["kept-elements"] = "kept-elements"
    num_kept: int
    num_elements: int


class WrongElements(Record):
    """How many elements of a tensor differ."""

    kind: Literal["wrong-elements"] = "wrong-elements"
    num_wrong: int
    num_elements: int


class RightAlike(Record):
    """How many of the parameters that lie on an axis alike have right gradients, though the axis may be the cause."""

    kind: Literal["right-alike"] = "right-alike"
    axis: str
    num_right: int
    num_alike: int


class HiddenByRounding(Record):
    """The recipe's own rounding is large enough to hide a cause; float64 would show it."""

    kind: Literal["hidden-by-rounding"] = "hidden-by-rounding"
    precision: str


class OtherPasses(Record):
    """How many rows each forward pass of a step had in two runs that saw the same rows; `step` is the step.

    What is no sum over rows differs between them in a right script too: a balance loss, expert capacity, batch norm.
    """

    kind: Literal["other-passes"] = "other-passes"
    step: int
    expected: tuple[int, ...]
    actual: tuple[int, ...]


class DiagnosisFailed(Record):
    """The search for causes raised, or its ranks were lost; verdict and findings do not depend on it.

    `error` is the type of the exception and `site` its file:line, both empty where ranks were lost.
    """

    kind: Literal["diagnosis-failed"] = "diagnosis-failed"
    message: str
    error: str = ""
    site: str = ""


Observation = Annotated[
    FitResult
    | ReplicaSum
    | LargestValue
    | ScalarValues
    | RankValues
    | MatchingSlices
    | Distance
    | RelativeError
    | FirstDivergence
    | StaleWeights
    | TriedOrders
    | KeptElements
    | WrongElements
    | RightAlike
    | HiddenByRounding
    | OtherPasses
    | DiagnosisFailed,
    Field(discriminator="kind"),
]
