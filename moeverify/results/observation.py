"""Observations: the measurements that lead to a cause, one record per kind.

A new kind needs a record here, a member of `Observation`, and a line in
`moeverify.report.words.observation`.
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

    `residual` is the unexplained share of the error, in the tensor with the worst fit.
    """

    kind: Literal["fit"] = "fit"
    contributions: tuple[Contribution, ...]
    residual: float


class ReplicaSum(Record):
    """The sum of the replicas over a mesh axis, as a multiple of the expected value."""

    kind: Literal["replica-sum"] = "replica-sum"
    axis: str
    num_replicas: int
    factor: float
    residual: float | None = None


class LargestValue(Record):
    """The actual and expected largest absolute value of a tensor; `absent_on` are ranks without it."""

    kind: Literal["largest-value"] = "largest-value"
    expected: float
    actual: float
    absent_on: tuple[int, ...] = ()


class ScalarValues(Record):
    """The actual and expected value of a named number, such as a loss; `rank` is set if ranks differ."""

    kind: Literal["scalar-values"] = "scalar-values"
    name: str = ""
    expected: float
    actual: float
    rank: int | None = None


class RankValues(Record):
    """The distinct values of a number that should be equal on all ranks."""

    kind: Literal["rank-values"] = "rank-values"
    values: tuple[float, ...]


class RelativeError(Record):
    """The largest relative error (Frobenius norm), and units of rounding by dtype for comparison."""

    kind: Literal["relative-error"] = "relative-error"
    error: float
    units: dict[str, float] = Field(default_factory=dict)


class FirstDivergence(Record):
    """The first input or output of a module that differs, in the order of one device.

    `error` is relative. The `num_right` readings before it match, with errors
    up to `worst_right`. `num_wrong` of `num_tokens` tokens are wrong.
    """

    kind: Literal["first-divergence"] = "first-divergence"
    direction: Direction
    module: str = ""
    end: End = "output"
    error: float
    ranks: tuple[int, ...] = ()
    num_wrong: int = 0
    num_tokens: int = 0
    num_right: int = 0
    worst_right: float = 0.0


class TriedOrders(Record):
    """The number of tried orders of the correct values, and of those that reproduce every value."""

    kind: Literal["tried-orders"] = "tried-orders"
    num_tried: int
    num_giving: int


class KeptElements(Record):
    """The number of elements that a checkpoint load did not change."""

    kind: Literal["kept-elements"] = "kept-elements"
    num_kept: int
    num_elements: int


class WrongElements(Record):
    """The number of elements of a tensor that differ."""

    kind: Literal["wrong-elements"] = "wrong-elements"
    num_wrong: int
    num_elements: int


class RightAlike(Record):
    """Parameters with the same placement on the suspected axis as the wrong ones.

    `num_right` of `num_alike` of them have correct gradients, which is evidence against the axis.
    """

    kind: Literal["right-alike"] = "right-alike"
    axis: str
    num_right: int
    num_alike: int


class HiddenByRounding(Record):
    """Rounding of the recipe's precision that may hide a cause; float64 would show it."""

    kind: Literal["hidden-by-rounding"] = "hidden-by-rounding"
    precision: str


class OtherPasses(Record):
    """Different numbers of rows per forward pass in two runs that saw the same rows in a step.

    Values that are not sums over rows then differ in a correct script too: a balance loss, expert capacity,
    batch norm.
    """

    kind: Literal["other-passes"] = "other-passes"
    step: int
    expected: tuple[int, ...]
    actual: tuple[int, ...]


class OtherLosses(Record):
    """The losses of two runs in a step with equal rows and weights, where no hypothesis explains the gradients.

    With `rank`, they are those of one forward pass with the same rows in both runs. Otherwise they are sums
    over the passes of a step, averaged over ranks. `has_outputs` means that module outputs were compared.
    """

    kind: Literal["other-losses"] = "other-losses"
    step: int
    expected: float
    actual: float
    differ: bool
    rank: int | None = None
    has_outputs: bool = False


class AmbiguousCount(Record):
    """A factor of a watched script that is the number of ranks, or the equal number of micro-batches."""

    kind: Literal["ambiguous-count"] = "ambiguous-count"
    num_ranks: int
    num_micro_batches: int
    script: str = ""


class NoValues(Record):
    """No cause was searched for: the golden has sketches, and the hypotheses compare values."""

    kind: Literal["no-values"] = "no-values"


class DiagnosisFailed(Record):
    """A failed search for causes. Verdict and findings do not depend on it.

    `error` is the type of the exception and `site` its file:line. Both are empty if ranks were lost.
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
    | RelativeError
    | FirstDivergence
    | TriedOrders
    | KeptElements
    | WrongElements
    | RightAlike
    | HiddenByRounding
    | OtherPasses
    | OtherLosses
    | AmbiguousCount
    | NoValues
    | DiagnosisFailed,
    Field(discriminator="kind"),
]
