"""Operations that turn correct values into wrong ones, as a diagnosis can find them.

An operation acts on parts (`moeverify.results.part`) by factors, whose sources have names
(`moeverify.results.factor`). A new operation needs a record here, a member of `Operation`, and a sentence
in `moeverify.report.words.operation`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moeverify.results.factor import Factor, Product
from moeverify.results.initial_values import InitialSource
from moeverify.results.layout import Reordered
from moeverify.results.part import Block, Contribution, Group
from moeverify.results.record import Record
from moeverify.results.upstream import OffUpstream


class Scaled(Record):
    """Parts with a wrong multiple: too large, too small, missing, or counted although they should not be.

    `contributions` has the wrong parts. `local_means` is the number of shares if the weights come from a
    mean of means, where each share is divided by its own number of valid tokens; `means_factor` multiplies
    it.

    `ranks` are the affected ranks, if replicas on other ranks are correct. If `loss_scale` is nonzero, a
    norm is 2 ** `loss_scale` times the correct one, as with gradients that keep a loss scale.
    """

    kind: Literal["scaled"] = "scaled"
    contributions: tuple[Contribution, ...]
    local_means: int = 0
    means_factor: Factor | None = None
    ranks: tuple[int, ...] = ()
    loss_scale: int = 0


class Unreduced(Record):
    """Ranks hold partial sums, because a reduction over a mesh axis is missing.

    `axes` are the axes whose groups explain it equally well. `num_replicas` is the size of a group; the sum
    over a group is `factor` times the expected value.
    """

    kind: Literal["unreduced"] = "unreduced"
    axes: tuple[Product, ...]
    num_replicas: int
    factor: Factor


class Misplaced(Record):
    """Ranks that each hold as much as the whole tensor of shape `expected`, as parts of a larger tensor.

    The larger tensor has the shape `actual`. `axes` are the axes whose number of ranks equals the ratio
    along `dim`.
    """

    kind: Literal["misplaced"] = "misplaced"
    expected: tuple[int, ...]
    actual: tuple[int, ...]
    dim: int | None = None
    axes: tuple[Product, ...] = ()


class Zeroed(Record):
    """A tensor of zeros, or with `absent`, a tensor that no rank has."""

    kind: Literal["zeroed"] = "zeroed"
    absent: bool = False


class Moved(Record):
    """Correct values in other positions; with `copies`, some are in several positions and others in none.

    `moves` has the first (to, from) of `num_moves` pairs of slices along `dim`. It is
    empty for elements.
    """

    kind: Literal["moved"] = "moved"
    unit: Literal["slice", "element"]
    dim: int | None = None
    moves: tuple[tuple[int, int], ...] = ()
    num_moves: int = 0
    copies: bool = False


class Shifted(Record):
    """A shard that starts `offset` elements too far along the saved tensor, or too early if negative."""

    kind: Literal["shifted"] = "shifted"
    offset: int
    rank: int


class Replaced(Record):
    """The values of something else: another step, another tensor, or the state before a load.

    `tensor` names the other tensor; `exchanged` means that it is wrong too.
    """

    kind: Literal["replaced"] = "replaced"
    by: Literal["step-before", "value-before-load", "tensor", "weights-of-step-before"]
    tensor: str = ""
    exchanged: bool = False
    ranks: tuple[int, ...] = ()


class Unmoved(Record):
    """A weight or state that a step should have changed and did not.

    `ranks`, if given, are the affected ranks; the others are correct. `unused` means that these ranks hold
    the parameter but never receive a gradient of it.
    """

    kind: Literal["unmoved"] = "unmoved"
    ranks: tuple[int, ...] = ()
    unused: bool = False


class NormOfSlices(Record):
    """A norm in which squares are not summed over one of `axes`, for some or all parameters.

    A slice is everything that the ranks of one coordinate of the axis hold together, plus all parameters
    outside `group`. `combination` says how the norms of the slices are used:

    - `own`: each rank has the norm of its own slice
    - `one`: all ranks have the norm of one slice, at `coordinate` if it is unique
    - `mean`, `sum`, `root-mean-square`: all ranks have this combination of the norms of the slices

    `is_largest` marks the slice with the largest norm. With `is_apart`, the combination is over `group`
    alone, and its square is added to the other squares.
    """

    kind: Literal["norm-of-slices"] = "norm-of-slices"
    combination: Literal["own", "one", "mean", "sum", "root-mean-square"]
    axes: tuple[Product, ...] = ()
    group: Group | None = None
    coordinate: int | None = None
    is_largest: bool = False
    is_apart: bool = False


class Rounded(Record):
    """Values that are correct up to the rounding of a narrower `dtype`: every value is one of it."""

    kind: Literal["rounded"] = "rounded"
    dtype: str


class Miscounted(Record):
    """A rank whose count differs from the routing.

    `counts_padding` means that it is the count of all tokens, in place of the valid ones.
    """

    kind: Literal["miscounted"] = "miscounted"
    expected: float
    actual: float
    rank: int
    counts_padding: bool = False


class RepeatedShard(Record):
    """Two ranks with the same values in shards that should differ."""

    kind: Literal["repeated-shard"] = "repeated-shard"
    ranks: tuple[int, int]


class OwnValues(Record):
    """Ranks with values of their own, where other ranks have the correct ones; over `axes`, if known.

    For initial values, `source` is the source of the correct ones.
    """

    kind: Literal["own-values"] = "own-values"
    ranks: tuple[int, ...]
    axes: tuple[str, ...] = ()
    source: InitialSource = "seed"


class Stepped(Record):
    """An optimizer's step counter that is `num_steps` too high, or too low if negative."""

    kind: Literal["stepped"] = "stepped"
    num_steps: int


class Carried(Record):
    """A step that starts with optimizer state other than the one after the previous step.

    The state is `factor` times the previous one; zero means a reset. Without `factor`, it is the state of
    other slices along the dim of `block`, and `moves` has the first (to, from) pairs. `block` has the wrong
    slices, or is None if the whole shard is wrong. `ranks` are the wrong ranks, or empty for all.
    """

    kind: Literal["carried"] = "carried"
    factor: Factor | None = None
    moves: tuple[tuple[int, int], ...] = ()
    block: Block | None = None
    ranks: tuple[int, ...] = ()


class Altered(Record):
    """Values that differ in an unknown way, only from micro-batch `first_micro_batch` on.

    `inputs_seen` means that the inputs were compared and are correct. `is_no_number` means that some values
    are NaN or infinite.
    """

    kind: Literal["altered"] = "altered"
    first_micro_batch: int = 0
    inputs_seen: bool = True
    is_no_number: bool = False


Operation = Annotated[
    Scaled
    | Unreduced
    | Misplaced
    | Zeroed
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
    | Altered,
    Field(discriminator="kind"),
]
