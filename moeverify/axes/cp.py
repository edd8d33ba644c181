"""The axis of context parallelism: its ranks see other positions of the same rows.

Which positions, and what they must be a multiple of, is said by the chosen `context_parallel`.
"""

from __future__ import annotations

from moeverify.axes.axis import Axis, Divided
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
