"""Operations that turn right values into wrong ones, as a diagnosis can find them.

An operation acts on parts (`moeverify.results.part`) by factors, whose sources have names
(`moeverify.results.factor`). A new one is a record here, a member of `Operation`, and its sentence in
`moeverify.report.words.operation`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moeverify.results.factor import Factor, Product
from moeverify.results.initial_values import InitialSource
from moeverify.results.layout import Reordered
from moeverify.results.part import Block, Contribution, Group, Tokens
from moeverify.results.record import Record
from moeverify.results.upstream import OffUpstream

OwnTokens = Literal["times", "divided", "share", "of-largest", "largest-over", "root"]
"""What a weight is of a share's number of valid tokens: it, one over it, it over the mean of all shares or over the
largest, the largest over it, or the root of it over the mean."""


class Scaled(Record):
    """Parts are there more or less often than once: too large, too small, missing, or counted though they should not.

    `contributions` has the parts that are off. `local_means` says that the weights are those of a mean over the
    means of so many shares, each divided by its own number of valid tokens, times `means_factor`. `own_tokens` says
    what the weights are of the shares' own numbers of valid tokens. `ranks` are those that have it so, where replicas
    on others are right. Where `loss_scale` is not 0, a norm is 2 to that power times the right one, as where
    gradients keep a scale of the loss.
    """

    kind: Literal["scaled"] = "scaled"
    contributions: tuple[Contribution, ...]
    local_means: int = 0
    means_factor: Factor | None = None
    own_tokens: OwnTokens | None = None
    ranks: tuple[int, ...] = ()
    loss_scale: int = 0


class Unreduced(Record):
    """Ranks hold partial sums: a reduction over an axis is missing.

    `axes` are those whose groups explain it equally well, `num_replicas` the ranks of a group, and the sum over a
    group is `factor` times the expected value. With `block` that holds of these slices alone, and
    the others are right. `is_over_holders` says that each slice is on some ranks of its own, `num_replicas` at most.
    """

    kind: Literal["unreduced"] = "unreduced"
    axes: tuple[Product, ...]
    num_replicas: int
    factor: Factor
    block: Block | None = None
    is_over_holders: bool = False


class Misplaced(Record):
    """Ranks hold as much as the whole tensor of shape `expected`, placed as parts of a larger one, `actual`.

    `axes` are those whose number of ranks is by how much that is larger along `dim`.
    """

    kind: Literal["misplaced"] = "misplaced"
    expected: tuple[int, ...]
    actual: tuple[int, ...]
    dim: int | None = None
    axes: tuple[Product, ...] = ()


class Zeroed(Record):
    """Everything is zero, or `absent`: no rank has a value."""

    kind: Literal["zeroed"] = "zeroed"
    absent: bool = False


class LostElements(Record):
    """Up to `num_lost` of a shard's `num_elements` are zero, the last ones if `at_end`; all others are right.

    Where they are whole slices along `dim`, `slices` has the first of their global indices, of `num_slices`, and
    `own` those in the part of each rank, where all have the same ones.
    """

    kind: Literal["lost-elements"] = "lost-elements"
    num_lost: int
    num_elements: int
    at_end: bool
    ranks: tuple[int, ...]
    dim: int | None = None
    slices: tuple[int, ...] = ()
    num_slices: int = 0
    own: tuple[int, ...] = ()


class Moved(Record):
    """The right values stand in other places; with `copies`, some stand in several places and others in none.

    `moves` has the first (to, from) of `num_moves`: slices along `dim`, or micro-batches; for elements in another
    order they are not known.
    """

    kind: Literal["moved"] = "moved"
    unit: Literal["slice", "element", "micro-batch"]
    dim: int | None = None
    moves: tuple[tuple[int, int], ...] = ()
    num_moves: int = 0
    copies: bool = False


class Shifted(Record):
    """What a rank holds begins `offset` elements too far along its part, or too early where that is negative."""

    kind: Literal["shifted"] = "shifted"
    offset: int
    rank: int


class Replaced(Record):
    """It has the values of something else: of another time, of another tensor, of what was there before a load.

    `tensor` names the other tensor; `exchanged` says that that one is wrong too.
    """

    kind: Literal["replaced"] = "replaced"
    by: Literal["step-before", "initial-value", "value-before-load", "tensor", "weights-of-step-before"]
    tensor: str = ""
    exchanged: bool = False
    ranks: tuple[int, ...] = ()


class Unmoved(Record):
    """The optimizer has not changed the weight, or a step has not changed the state, though it should have.

    With `ranks` that holds of these alone, and what the others have is right. `unused` says that these hold the
    parameter, and that no gradient of it comes there.
    """

    kind: Literal["unmoved"] = "unmoved"
    ranks: tuple[int, ...] = ()
    unused: bool = False


class NormOfSlices(Record):
    """The squares of what ranks have are not summed over one of `axes`: of some parameters, or of all.

    A slice is what the ranks of one coordinate of the axis have together, with all that is not of `group`. Each rank
    has the norm of its own slice; or all have that of one slice, at `coordinate` where all `axes` agree in it; or a
    `combination` of the slices' norms: their mean, their sum, or the root of the mean of their squares. With
    `is_apart` it is one of the norms of `group` alone, whose square is added to the others.
    """

    kind: Literal["norm-of-slices"] = "norm-of-slices"
    combination: Literal["own", "one", "mean", "sum", "root-mean-square"]
    axes: tuple[Product, ...] = ()
    group: Group | None = None
    coordinate: int | None = None
    is_largest: bool = False
    is_apart: bool = False


class Rounded(Record):
    """Right but for the rounding of a narrower dtype: every value is one of `dtype`, or errors have its size."""

    kind: Literal["rounded"] = "rounded"
    dtype: str
    is_representable: bool


class Miscounted(Record):
    """A rank counts another number of things than the routing says."""

    kind: Literal["miscounted"] = "miscounted"
    expected: float
    actual: float
    rank: int


class RepeatedShard(Record):
    """Two ranks hold the same values in parts that should differ."""

    kind: Literal["repeated-shard"] = "repeated-shard"
    ranks: tuple[int, int]


class OwnValues(Record):
    """Some ranks have values of their own, where others have the right ones; over `axes`, where that is known.

    Of initial values the right ones are those of their `source`.
    """

    kind: Literal["own-values"] = "own-values"
    ranks: tuple[int, ...]
    axes: tuple[str, ...] = ()
    source: InitialSource = "seed"


class Stepped(Record):
    """An optimizer's counter of steps has another number than it should: `num_steps` too many, or too few."""

    kind: Literal["stepped"] = "stepped"
    num_steps: int


class Carried(Record):
    """A step began with other optimizer state than the step before had left.

    With `factor` times of it, zero where it was reset; or with that of other slices along the dim of `block`, the
    first (to, from) of which are `moves`; or with the state of `num_steps` steps before. `block` has the slices that
    are off, None where all of a rank's are; `ranks` are those that are off, empty where all are.
    """

    kind: Literal["carried"] = "carried"
    factor: Factor | None = None
    moves: tuple[tuple[int, int], ...] = ()
    num_steps: int = 1
    block: Block | None = None
    ranks: tuple[int, ...] = ()


class Crossed(Record):
    """Parts of the slices of `block` are in each other's sums; `ranks` has the one that put them there, if known."""

    kind: Literal["crossed"] = "crossed"
    block: Block
    ranks: tuple[int, ...] = ()


class Offset(Record):
    """A number is off by a constant: by the logarithm of `products`, where that is known."""

    kind: Literal["offset"] = "offset"
    value: float
    products: tuple[Product, ...] = ()


class Altered(Record):
    """It comes out otherwise, and how is not known; in the micro-batches from `first_micro_batch` on alone.

    With `tokens` it is right at all others. `inputs_seen` says that what it is made of was compared and is right;
    with `has_rows` that it has right rows, in an order for which nobody can say what it should be. With
    `is_no_number` some of it is NaN or infinite.
    """

    kind: Literal["altered"] = "altered"
    first_micro_batch: int = 0
    tokens: Tokens | None = None
    inputs_seen: bool = True
    has_rows: bool = False
    is_no_number: bool = False


Operation = Annotated[
    Scaled
    | Unreduced
    | Misplaced
    | Zeroed
    | LostElements
    | Moved
    | Reordered
    | Shifted
    | Replaced
    | Unmoved
    | NormOfSlices
    | OffUpstream
    | Rounded
    | Miscounted
    | RepeatedShard
    | OwnValues
    | Stepped
    | Carried
    | Crossed
    | Offset
    | Altered,
    Field(discriminator="kind"),
]
