"""The axis of data-parallel shards: its ranks process different rows; with cp they form the axis fsdp."""

from __future__ import annotations

from moeverify.cases.axes.axis import Axis, Divided
from moeverify.results.checks import Kind

AXIS = Axis(
    name="dp_shard",
    degree="dp_shard",
    size=lambda layout: layout.dp_shard,
    views=lambda _: ("data",),
    batch_dim="rows",
    divides=Divided(Kind.TOKEN_LOSS),
    custom_models="wrapped",
    is_varied=True,
)
