"""Facts that a check found for a finding, beside its numbers, as data.

`moeverify.report.words.check` turns them into sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from moeverify.results.data import DataFacts
from moeverify.results.guard import (
    AlikeFacts,
    DriftFacts,
    NonfiniteFacts,
    OwnNormFacts,
    SameWorkFacts,
    TokenFacts,
)
from moeverify.results.initial_values import InitialSource
from moeverify.results.record import Record
from moeverify.results.script import BatchFacts, CallFacts, CopyFacts, MemberFacts, NormFacts, OptionFacts
from moeverify.results.step_facts import NEAR, RecomputedFacts


class ComparedFacts(Record):
    """A comparison of a tensor with its golden.

    `absent_ranks` should have the tensor and do not. `is_unexpected` means that the golden has no such
    tensor. `source` is the source of its initial values, for tensors before step 0. `block` has the first
    and the end index of each dim of the block with the largest error, if the error was estimated from
    sketches.
    """

    about: Literal["compared"] = "compared"
    absent_ranks: tuple[int, ...] = ()
    is_unexpected: bool = False
    num_nonfinite: int = 0
    source: InitialSource | None = None
    block: tuple[tuple[int, int], ...] = ()


class BitFacts(Record):
    """Values that are equal as numbers but not bitwise: -0.0, another dtype, or underflowing differences."""

    about: Literal["bits"] = "bits"


Keeper = Literal["checkpoint", "optimizer"]


class ReboundFacts(Record):
    """A parameter or buffer that a module has rebound, and the objects that keep the old tensor.

    Without these, its values changed outside of the optimizer step, and were rounded if `rounded_to` is a dtype.
    """

    about: Literal["rebound"] = "rebound"
    kept_by: tuple[Keeper, ...] = ()
    rounded_to: str = ""


class ReplicaFacts(Record):
    """Groups of ranks with equal bits, the largest first, and the mesh axes along which the groups differ."""

    about: Literal["replicas"] = "replicas"
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...] = ()


class CoverageFacts(Record):
    """The number of elements of a tensor that the ranks hold together, with each region counted once."""

    about: Literal["coverage"] = "coverage"
    num_held: int
    num_elements: int | None = None


class ShardingFacts(Record):
    """A mesh axis over which something that it should shard is equal on all ranks.

    `part` is the part of the model's parameters that is affected. If `modules` is given, only these modules
    are affected. `is_repeated` means that several ranks hold modules that one rank should hold.
    `is_elsewhere` means that the wrong ranks hold them.

    `is_unused` means that a user's `parallelize` shards nothing over the axis and runs no collective over
    it. `is_misplaced` means that ranks of `ep` store experts that the placement of the step assigns to
    other ranks.
    """

    about: Literal["sharding"] = "sharding"
    axis: str
    part: Literal["all", "experts", "others"] = "all"
    modules: tuple[str, ...] = ()
    is_repeated: bool = False
    is_elsewhere: bool = False
    is_unused: bool = False
    is_misplaced: bool = False


class DtypeUse(StrEnum):
    """A use of a parameter that has a dtype, or an output, operator, residual stream or part of a module.

    `NARROW` is a module of one device that computes below float64 in a float64 recipe, and `UNREPRODUCED` one
    that cannot be called again with the same results.
    """

    COMPUTES = "computes"
    REDUCES = "reduces"
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    OUTPUT = "output"
    OPERATOR = "operator"
    RESIDUAL = "residual"
    NARROW = "narrow"
    UNREPRODUCED = "unreproduced"


class DtypeFacts(Record):
    """Parameters of a module with a dtype other than the one of the recipe or of a single device.

    `module` is empty for the whole model. `how` names the collectives that reduced, or the optimizer
    moments. `could_declare` means that `layout.in_float32` can declare the dtype as intended.

    For outputs, operators and residual streams, `module` is the first wrong one of the modules `parameters`.
    `how` names the wrong operator. `site` is the line that made the tensor, as `file:line in function`.
    """

    about: Literal["dtype"] = "dtype"
    use: DtypeUse
    module: str
    dtype: str
    wanted: str
    parameters: tuple[str, ...]
    num_known: int
    how: tuple[str, ...] = ()
    could_declare: bool = False
    site: str = ""


class GatheredFacts(Record):
    """Parameters of a module whose gathered values differ from the values that the ranks store.

    `module` is empty for the whole model; `parameter` is the first parameter. `num_wrong` of `num_compared`
    elements of that parameter differ, in the `dtype` in which they are used. `is_stale` means that all
    parameters have the values from before the last step. `sources` has pairs (rank, other): `rank` has the
    stored values of `other` instead of its own.
    """

    about: Literal["gathered"] = "gathered"
    module: str
    parameter: str
    num_parameters: int
    num_known: int
    dtype: str
    num_wrong: int
    num_compared: int
    is_stale: bool
    sources: tuple[tuple[int, int], ...] = ()


ScaleSource = Literal["", "none", "own-rank", "step-before", "another", "numbers", "product"]


class Float8Facts(Record):
    """Layers of a module in which float8 scales of some `operands` do not match their largest elements.

    `layer` has the scale with the largest error; the scale belongs to `operand`. `num_wrong` of
    `num_compared` scales are wrong there; the first one is `used` instead of `wanted`.

    `source` is the source of the wrong scales: the rank's own shard without a reduction over `axis`
    (`own-rank`), the previous step (`step-before`), the operand `other` (`another`), or unknown (empty).
    `none` means that nothing was rounded to float8. With `numbers` or `product` the scales are correct, but
    elements are wrong: elements of the operand, or of the product that `operand` names. The worst element
    may be off by `allowed`.
    """

    about: Literal["float8"] = "float8"
    layer: str
    operand: str = ""
    operands: tuple[str, ...] = ()
    source: ScaleSource = ""
    other: str = ""
    axis: str = ""
    module: str = ""
    num_layers: int = 1
    num_known: int = 1
    num_wrong: int = 0
    num_compared: int = 0
    used: float = 0.0
    wanted: float = 1.0
    allowed: float = 0.0


class PatternFacts(Record):
    """A pattern of `layout.in_float32` that matches no module that was seen to compute."""

    about: Literal["pattern"] = "pattern"
    pattern: str


class ExpertFacts(Record):
    """Experts with wrong values: pairs (number, number of the expert whose values it has, or None)."""

    about: Literal["experts"] = "experts"
    wrong: tuple[tuple[int, int | None], ...]


class ClipFacts(Record):
    """A gradient norm that does not match the gradients, or a clip coefficient that does not match it.

    The excluded fields are for the diagnosis only and do not appear in reports. `norms` are the norms of
    the ranks. `squares` has the sum of squares of each gradient. `sizes` has the sum and the maximum of the
    absolute values, and the number of elements. `held` has the sum of squares by parameter, rank and region
    key. `parts` has the region key by parameter and rank. `eps` is the machine epsilon of the norm's dtype.
    """

    about: Literal["clip"] = "clip"
    is_coefficient: bool = False
    norms: tuple[float, ...] = Field(default=(), exclude=True, repr=False)
    squares: Mapping[str, float] = Field(default={}, exclude=True, repr=False)
    sizes: Mapping[str, tuple[float, float, int]] = Field(default={}, exclude=True, repr=False)
    held: Mapping[str, Mapping[int, Mapping[str, float]]] = Field(default={}, exclude=True, repr=False)
    parts: Mapping[str, Mapping[int, str]] = Field(default={}, exclude=True, repr=False)
    eps: float = Field(default=0.0, exclude=True, repr=False)


class ObjectiveFacts(Record):
    """A reported loss that does not equal the sum of the ranks' own values.

    The tensor of the finding is the loss term.
    """

    about: Literal["objective"] = "objective"


class CrossEntropyFacts(Record):
    """Recomputed token losses that do not equal the cross entropy of their logits.

    `dtype` is a narrower dtype that can represent all of them, or empty.
    """

    about: Literal["cross entropy"] = "cross entropy"
    num_wrong: int
    num_tokens: int
    dtype: str = ""


Term = Literal["combine", "balance", "z", "balance padding", "z padding"]


class RouterGradientFacts(Record):
    """A loss term whose gradient at a router does not match its definition and the routing.

    `term` is `combine` for the gradient through the combine weights. A term with `padding` is the extra
    contribution of padding tokens, which should not exist. `factors` are multiples of the correct gradient
    by rank, or None if it is no multiple.

    `in_router` means that the router receives the correct gradient and passes a wrong one to its weight.
    `num_routers` routers show the same error.
    """

    about: Literal["router gradient"] = "router gradient"
    term: Term
    factors: dict[int, float | None]
    in_router: bool = False
    num_routers: int = 1


class GradientSumFacts(Record):
    """A gradient that does not equal the sum of the contributions that its layer computed on all ranks.

    `factors` are the multiples of each rank's contribution, empty if no multiples explain the gradient.
    `is_own` means that each rank has only its own contribution.
    """

    about: Literal["gradient sum"] = "gradient sum"
    factors: Mapping[int, float] = {}
    is_own: bool = False

    @property
    def factor(self) -> float | None:
        """Return the common multiple of all contributions, or None if the multiples differ."""
        values = tuple(self.factors.values())
        if not values or max(values) - min(values) > NEAR * max(map(abs, values)):
            return None
        return sum(values) / len(values)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Return the ranks whose contributions are missing, if the contributions of all others count once."""
        missing = tuple(rank for rank, value in self.factors.items() if abs(value) <= NEAR)
        others = [value for rank, value in self.factors.items() if rank not in missing]
        return missing if others and all(abs(value - 1.0) <= NEAR for value in others) else ()


class RouterFacts(Record):
    """Tokens whose routing does not follow from the router's own input and weights, or wrong expert counts.

    `quantity` is wrong for `num_wrong` of `num_tokens` tokens. `margin` is the largest score margin among
    tokens that chose another expert, relative to the rounding of the scores.
    """

    about: Literal["router"] = "router"
    quantity: Literal["choice", "weights", "counts"]
    num_wrong: int
    num_tokens: int
    margin: float | None = None


class Issue(Record):
    """The collective that some ranks issued at one position of a stream, or None if they issued no more."""

    ranks: tuple[int, ...]
    signature: str | None
    site: str = ""


class CollectiveFacts(Record):
    """The first collective in which the ranks of a group differ, with the collective of each rank.

    `number` counts from 1. `issues` are ordered by the number of ranks with the same collective. They are
    empty if the record is no longer available; the ranks then agree in all collectives before `number`.
    `counts` is the total per rank. For messages, `ranks` are the sender and the receiver. `group` is
    torch's name of the group.
    """

    about: Literal["collective"] = "collective"
    axis: str
    ranks: tuple[int, ...]
    number: int
    issues: tuple[Issue, ...] = ()
    counts: dict[int, int]
    is_message: bool = False
    group: str = ""


Facts = Annotated[
    ComparedFacts
    | BitFacts
    | ReboundFacts
    | ReplicaFacts
    | CoverageFacts
    | DataFacts
    | ShardingFacts
    | DtypeFacts
    | PatternFacts
    | GatheredFacts
    | Float8Facts
    | ExpertFacts
    | CollectiveFacts
    | BatchFacts
    | MemberFacts
    | OptionFacts
    | CallFacts
    | NormFacts
    | DriftFacts
    | AlikeFacts
    | CopyFacts
    | TokenFacts
    | SameWorkFacts
    | OwnNormFacts
    | NonfiniteFacts
    | RecomputedFacts
    | ClipFacts
    | ObjectiveFacts
    | CrossEntropyFacts
    | RouterGradientFacts
    | GradientSumFacts
    | RouterFacts,
    Field(discriminator="about"),
]


def names_operation(facts: Facts | None) -> bool:
    """Return whether facts that are a cause on their own name an operation, and not only an error.

    A check that recomputes a result sees that the result differs, and usually not how. For example, the
    router's weights may not match its scores; the comparison of modules then finds the actual formula.
    """
    if isinstance(facts, RecomputedFacts):
        return facts.is_rounding_sure or facts.is_still or (bool(facts.wrong_terms) and not facts.is_estimate)
    if isinstance(facts, CrossEntropyFacts):
        return bool(facts.dtype)
    if isinstance(facts, RouterGradientFacts):
        return facts.term.endswith("padding") or None not in facts.factors.values()
    if isinstance(facts, GradientSumFacts):
        return facts.is_own or bool(facts.factors)
    return not isinstance(facts, ClipFacts | ObjectiveFacts | RouterFacts)


class NumCollectives(Record):
    """The number of compared collectives, from the rank that issued most."""

    about: Literal["num collectives"] = "num collectives"
    most: int


class Dtypes(Record):
    """The dtypes that a recipe specifies, and the parameters that were not seen to compute."""

    about: Literal["dtypes"] = "dtypes"
    computes: str
    kept: str
    num_parameters: int
    num_unseen: int = 0
    first_unseen: str = ""


class NarrowParts(Record):
    """Modules that one device computes below float64 in a float64 recipe; empty is outside of all modules.

    `num_tensors` compared tensors depend on them and have wider bounds, of `num_compared`.
    """

    about: Literal["narrow parts"] = "narrow parts"
    dtype: str
    modules: tuple[str, ...]
    num_tensors: int = 0
    num_compared: int = 0


class ReplayedModules(Record):
    """Modules that one device's module computed again, and those that it could not, by reason.

    An empty reason means that one device does not reproduce the module either. `num_near_ties` counts the rows
    near a tie in which the ranks chose, and `num_held` those that took one device's choice.
    """

    about: Literal["replayed modules"] = "replayed modules"
    num_replayed: int
    left_out: dict[str, tuple[str, ...]]
    num_near_ties: int = 0
    num_held: int = 0


class AxisUse(Record):
    """The use of one mesh axis by a user's `parallelize`.

    `num_divided` is the number of parameters that it shards in each group, and `share` their share of all
    elements. `collectives` counts those of one rank over the axis in the training steps, by operation.
    """

    axis: str
    num_divided: int
    num_parameters: int
    share: float = 1.0
    collectives: dict[str, int]

    @property
    def is_used(self) -> bool:
        """Return whether the axis shards a parameter, or any collective ran over it."""
        return self.num_divided > 0 or bool(self.collectives)


class AxisUses(Record):
    """The use of each mesh axis of more than one rank by a user's `parallelize`."""

    about: Literal["axis uses"] = "axis uses"
    axes: tuple[AxisUse, ...]


class OwnStep(Record):
    """Results of a user's own step that are not checked, because one device computes them differently too.

    These are results that a check recomputes from the recipe. `first` is the tensor of one of them.
    """

    about: Literal["own step"] = "own step"
    step: str
    num_tensors: int
    first: str


class BySketch(Record):
    """Tensors of a check with errors from sketches; `num_open` are too near to their bounds to decide."""

    about: Literal["sketch"] = "sketch"
    num_projections: int
    num_tensors: int
    num_open: int = 0


CheckFacts = Annotated[
    BySketch | NumCollectives | Dtypes | NarrowParts | ReplayedModules | AxisUses | OwnStep,
    Field(discriminator="about"),
]
