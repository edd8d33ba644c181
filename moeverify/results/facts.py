"""Facts of a finding: what its check found, beside the numbers that every finding has, as data and not in words.

`moeverify.report.words.check` makes the sentences.
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
from moeverify.results.script import BatchFacts, CallFacts, MemberFacts, NormFacts, OptionFacts
from moeverify.results.step_facts import NEAR, RecomputedFacts


class ComparedFacts(Record):
    """A tensor beside its golden: ranks that have none although they should, a tensor that the golden lacks.

    `source` is where its initial values come from, of those before step 0.
    """

    about: Literal["compared"] = "compared"
    absent_ranks: tuple[int, ...] = ()
    is_unexpected: bool = False
    num_nonfinite: int = 0
    source: InitialSource | None = None


class BitFacts(Record):
    """Values that are equal as numbers and yet have other bits: -0.0, another dtype, differences that underflow."""

    about: Literal["bits"] = "bits"


Keeper = Literal["checkpoint", "optimizer"]


class ReboundFacts(Record):
    """A parameter or buffer that a module has bound to another tensor, and what keeps the old one."""

    about: Literal["rebound"] = "rebound"
    kept_by: tuple[Keeper, ...]


class ReplicaFacts(Record):
    """Groups of ranks with equal bits, the largest first, and the mesh axes along which the groups differ."""

    about: Literal["replicas"] = "replicas"
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...] = ()


class CoverageFacts(Record):
    """How many of a tensor's elements the ranks hold together, each region counted once."""

    about: Literal["coverage"] = "coverage"
    num_held: int
    num_elements: int | None = None


class ShardingFacts(Record):
    """An axis over which nothing of what it is there to divide differs; `part` is of the model's parameters.

    With `modules` nothing of these alone differs; where it is `is_repeated`, several ranks have what one should, and
    where it is `is_elsewhere`, other ranks have them than should.

    `is_unused` says that it is an axis of a user's `parallelize`, over which no collective ran either; `is_misplaced`
    that ranks of `ep` store other experts than the placement of the step gives them.
    """

    about: Literal["sharding"] = "sharding"
    axis: str
    part: Literal["all", "experts", "others"] = "all"
    modules: tuple[str, ...] = ()
    is_repeated: bool = False
    is_elsewhere: bool = False
    is_unused: bool = False
    is_misplaced: bool = False


class Use(StrEnum):
    """A use of a parameter, which has a dtype."""

    COMPUTES = "computes"
    REDUCES = "reduces"
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"


class DtypeFacts(Record):
    """Parameters of a module that were in another dtype than the recipe asks for.

    `module` is empty for the whole model. `how` names the collectives that reduced, or the moments; `could_declare`
    says that `layout.in_float32` would make it right.
    """

    about: Literal["dtype"] = "dtype"
    use: Use
    module: str
    dtype: str
    wanted: str
    parameters: tuple[str, ...]
    num_known: int
    how: tuple[str, ...] = ()
    could_declare: bool = False


class GatheredFacts(Record):
    """Parameters of a module that were used with other values than the ranks store; `parameter` is the first.

    `module` is empty for the whole model. Of `num_compared` elements of that parameter `num_wrong` differ, in the
    `dtype` in which they are used; `is_stale` says that all have the values from before the last step.
    `sources` has (rank, other) where the ranks use in the place of their own parts what another one stores.
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
    """Layers of a module some of whose `operands` have other scales than their largest elements ask for.

    `layer` has the scale that is furthest off, that of `operand`.
    `source` is where the scales come from: the largest elements of the rank's own part of what is cut over `axis`,
    those of the step before, those of `other`; empty where nobody knows, and `none` where nothing was rounded to
    float8. There the first of `num_wrong` of `num_compared` scales was `used` in place of `wanted`. Where the source
    is `numbers` or `product`, scales are right and elements are not: of the operand, or of the product that is called
    `operand` there, where the worst may be off by `allowed`.
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
    """A pattern of `layout.in_float32` that names no module which was seen to compute."""

    about: Literal["pattern"] = "pattern"
    pattern: str


class ExpertFacts(Record):
    """Experts that do not have the values of their number: (number, that whose values it has; None: nobody's)."""

    about: Literal["experts"] = "experts"
    wrong: tuple[tuple[int, int | None], ...]


class ClipFacts(Record):
    """A gradient norm that is not that of the gradients, or a clip coefficient that is not that of the norm.

    For a diagnosis alone, not in reports: the ranks' `norms`, the `squares` of the gradients by parameter, their
    `sizes` (the sum and the largest of absolute values, and how many there are), what is `held` of each by rank and
    key of the region, the `parts` of each parameter that ranks have, as such keys, and the norm's machine epsilon.
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
    """A reported loss that is not what the ranks' own values add up to; the finding's tensor is the term."""

    about: Literal["objective"] = "objective"


class CrossEntropyFacts(Record):
    """Token losses that are not the cross entropy of their logits, of those that were computed again.

    `dtype` is a narrower one that can represent all of them, if any.
    """

    about: Literal["cross entropy"] = "cross entropy"
    num_wrong: int
    num_tokens: int
    dtype: str = ""


Term = Literal["combine", "balance", "z", "balance padding", "z padding"]
Form = Literal["", "own", "padded", "uniform", "layers"]


class RouterGradientFacts(Record):
    """A loss term that comes back to a router otherwise than its definition and the routing say.

    `term` is `combine` for what comes through the combine weights, and a term with `padding` for what tokens of
    padding add to it, which is not in the right one. `factors` are by rank, None where it is no
    multiple of the right one. `form` is what the shares of the experts in the balance loss were taken from: the
    rank's own tokens, padding too, all experts alike, or the mean over the layers. `in_router` says that the router
    gets the right one, and passes another one on to its weight. `num_routers` have the like.
    """

    about: Literal["router gradient"] = "router gradient"
    term: Term
    factors: dict[int, float | None]
    form: Form = ""
    in_router: bool = False
    num_routers: int = 1


class GradientSumFacts(Record):
    """A gradient that is not the sum of what its layer has computed on all ranks.

    `factors` are by rank how often its part is there, empty where that explains nothing. `is_own` says that each rank
    has its own part alone.
    """

    about: Literal["gradient sum"] = "gradient sum"
    factors: Mapping[int, float] = {}
    is_own: bool = False

    @property
    def factor(self) -> float | None:
        """Return how often the parts of all ranks are there, where that is one number."""
        values = tuple(self.factors.values())
        if not values or max(values) - min(values) > NEAR * max(map(abs, values)):
            return None
        return sum(values) / len(values)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Return the ranks whose parts are missing, where those of all others are there once."""
        missing = tuple(rank for rank, value in self.factors.items() if abs(value) <= NEAR)
        others = [value for rank, value in self.factors.items() if rank not in missing]
        return missing if others and all(abs(value - 1.0) <= NEAR for value in others) else ()


class RouterFacts(Record):
    """Tokens that a router sent elsewhere than its own input and weights say, or experts that it counted wrong.

    `quantity` is what is wrong with `num_wrong` of `num_tokens`. `margin` is the largest one, relative to the
    rounding of the scores, among tokens that chose another expert: how clear the right choice was. Where `rounded` to
    a `dtype`, the scores or logits of the router give the weights that it has, bit for bit. `rule` is the one by
    which it has chosen or weighed, where one is known, the names of its ways joined by "+", and `rivals` are others
    that give the same; `numbers` are what some of them are solved for.
    """

    about: Literal["router"] = "router"
    quantity: Literal["choice", "weights", "counts"]
    num_wrong: int
    num_tokens: int
    margin: float | None = None
    rounded: Literal["", "scores", "logits"] = ""
    dtype: str = ""
    rule: str | None = None
    rivals: tuple[str, ...] = ()
    numbers: Mapping[str, float] = Field(default_factory=dict)


class Issue(Record):
    """What some ranks issued at one place of a stream of collectives; None where they issued no further one."""

    ranks: tuple[int, ...]
    signature: str | None
    site: str = ""


class CollectiveFacts(Record):
    """The first collective in which the ranks of a group differ: its number from 1, and what each rank issued.

    `issues` are in order of how many ranks did the same; there are none where that is no longer known, and then the
    ranks agree in all before `number`. `counts` say how many each rank issued in all. Of messages from one rank to
    another, `ranks` are the sender and the receiver. `group` is torch's name for the group.
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
    """Return whether facts that are a cause by themselves say what was done, and not alone that something is off.

    A check that computes a result again sees that it is another one, and mostly not which: the router's weights are
    not those of its scores. What else they are is found where the modules are compared.
    """
    if isinstance(facts, RecomputedFacts):
        return facts.is_rounding_sure or facts.is_still or (bool(facts.wrong_terms) and not facts.is_estimate)
    if isinstance(facts, CrossEntropyFacts):
        return bool(facts.dtype)
    if isinstance(facts, RouterGradientFacts):
        return facts.term.endswith("padding") or None not in facts.factors.values()
    if isinstance(facts, GradientSumFacts):
        return facts.is_own or bool(facts.factors)
    if isinstance(facts, RouterFacts):
        return bool(facts.rounded or facts.rule)
    return not isinstance(facts, ClipFacts | ObjectiveFacts)


class NumCollectives(Record):
    """How many collectives were compared: those of the rank that issued most."""

    about: Literal["num collectives"] = "num collectives"
    most: int


class Dtypes(Record):
    """The dtypes that a recipe asks for, and the parameters that nobody saw compute."""

    about: Literal["dtypes"] = "dtypes"
    computes: str
    kept: str
    num_parameters: int
    num_unseen: int = 0
    first_unseen: str = ""


class AxisUse(Record):
    """What a user's `parallelize` does with an axis: how many parameters it divides in each of its groups.

    `collectives` are those that a rank issued over it in the training steps, by operation.
    """

    axis: str
    num_divided: int
    num_parameters: int
    collectives: dict[str, int]

    @property
    def is_used(self) -> bool:
        """Return whether the axis divides something, or anything is sent over it."""
        return self.num_divided > 0 or bool(self.collectives)


class AxisUses(Record):
    """What a user's `parallelize` does with each axis of more than one rank."""

    about: Literal["axis uses"] = "axis uses"
    axes: tuple[AxisUse, ...]


class OwnStep(Record):
    """Results of a user's own step that no rank is asked for: one device makes them otherwise than the recipe, too.

    Of those results that a check computes again from what the recipe says. `first` is the tensor of one of them.
    """

    about: Literal["own step"] = "own step"
    step: str
    num_tensors: int
    first: str


CheckFacts = Annotated[NumCollectives | Dtypes | AxisUses | OwnStep, Field(discriminator="about")]
