"""The axis of context parallelism: its ranks process different positions of the same rows.

The chosen `context_parallel` defines the split of positions and the required divisor of the sequence
length.
"""

from __future__ import annotations

from moeverify.cases.axes.axis import Axis, Divided
from moeverify.results.checks import Kind

AXIS = Axis(
    name="cp",
    degree="cp",
    size=lambda layout: layout.cp,
    views=lambda _: ("data",),
    batch_dim="positions",
    divides=Divided(Kind.TOKEN_LOSS),
    is_varied=True,
)
