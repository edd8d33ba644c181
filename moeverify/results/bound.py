"""Where the bound of a tensor comes from, as data."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

BoundPart = Literal[
    "exact",
    "fixed",
    "floor",
    "measured",
    "typical",
    "narrow parts",
    "sign flips",
    "squares",
    "cancellation",
    "module",
    "recomputed",
]
"""A source of rounding:

- `measured`: the largest error of this tensor over the perturbed runs of one device
- `typical`: the median of that error over the tensors of the same kind
- `narrow parts`: parts of a float64 model that compute below float64
- `sign flips`: elements of an update whose sign the noise of the gradient may change
- `squares`: the measured error of a second moment of Adam, in which the noise of the gradient is squared
- `cancellation`: one unit of rounding of all tensors of the kind, for a tensor far smaller than they are
- `module`: one device's module, which computes the same again from the rank's inputs
- `recomputed`: a result that is recomputed from the rank's own values; derived from its formula
- `floor`: a few units of rounding of the precision
- `exact`, `fixed`: the tolerance of the case
"""


PerturbedRun = Literal["plain", "other order", "micro-batches", "moved weights", "float8", "own choices"]
"""A run of one device that measures bounds. It differs from the float64 run by

- `plain`: its precision alone
- `other order`: the order of the rows
- `micro-batches`: two micro-batches
- `moved weights`: initial weights off by one unit in the last place
- `float8`: the scales, or the roundings, of float8
- `own choices`: its own choices near a tie, for buffers alone
"""


class Bound(Record):
    """The widest bound of a tensor over the steps: its parts, the largest of which decides.

    `error` is the relative error in that step, if the check has one for the whole tensor. `factor` is the factor
    of the tolerance in the measured parts. The measured error is the one of `run`. Two errors that it may
    include: `plain`, of the plain run, and `stored`, by rounding the right weight to its dtype after an update.
    """

    check: str
    tensor: str
    step: int
    error: float | None = None
    parts: dict[BoundPart, float]
    factor: float = 1.0
    run: PerturbedRun | None = None
    plain: float | None = None
    stored: float | None = None


class NearChoices(Record):
    """Choices near a tie, such as of experts, in the runs of one device that measure bounds.

    `num_held` took the choice of the float64 run instead of their own one. `num_free` found no such row in that
    run: their flips are in the bounds. With `is_replayed` all choices are those of the float64 run.
    """

    num_held: int = 0
    num_free: int = 0
    is_replayed: bool = False
