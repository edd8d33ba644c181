"""Where initial values come from, and what wrong ones are in place of the right ones."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Product
from moeverify.results.record import Record

InitialSource = Literal["seed", "factory", "weights"]
"""Where the right ones come from: seed, FQN and global index give them, a user's factory, or a folder of weights."""


class ScaledByShape(Record):
    """Each weight is so many times the right one as a rule gives of its own shape: from `least` to `largest` times.

    The `power` of each factor is one of `products`, which all give the same.
    """

    kind: Literal["scaled-by-shape"] = "scaled-by-shape"
    products: tuple[Product, ...]
    power: int
    least: float
    largest: float


Distribution = Literal["right", "uniform", "normal", "constant", "identity", "orthogonal"]
"""How values are distributed: as they should be, evenly up to a bound, normally, all the same, or as the rows of such
a matrix."""


class Draw(Record):
    """A distribution of initial values, and its size.

    The square of the bound of uniform ones, or of the deviation of normal ones, is `times` over the product of
    `over`, which are sizes of the weight or of the model. Without a rule `number` is the bound, the deviation, or the
    constant.
    Normal ones may be `cut` at so many deviations; the deviation is that before the cut, or after it.
    """

    distribution: Distribution
    times: float = 1.0
    over: tuple[str, ...] = ()
    number: float | None = None
    cut: int = 0
    is_after_cut: bool = False


class Tails(Record):
    """Values beyond so many `deviations`, or a `bound`, are others; all within are `factor` times the right ones.

    The others are drawn again within the bound, stand at it, or are zero. Neither is given where nothing is known but
    that these are the largest of each weight.
    """

    way: Literal["drawn-again", "cut-off", "zero"]
    deviations: float | None = None
    bound: float | None = None
    factor: float = 1.0
    num_beyond: int
    num_elements: int


class Spread(Record):
    """Values lie around `mean` with a `deviation`, which the right ones do not.

    `like` are the first of `num_like` kinds of tensors of the model that should be as these are.
    """

    mean: float
    deviation: float
    right_mean: float
    right_deviation: float
    like: tuple[str, ...] = ()
    num_like: int = 0


class Drawn(Record):
    """Initial values that are others than those of their `source`, and how they are distributed.

    `draws` are all distributions that they may have, the simplest first. With `tails` they are the right ones but for
    the largest. With `spread` no more is known than around which number they lie, and how far from it.
    """

    kind: Literal["drawn"] = "drawn"
    draws: tuple[Draw, ...] = ()
    tails: Tails | None = None
    spread: Spread | None = None
    source: InitialSource = "seed"
