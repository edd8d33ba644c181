"""The axis of data-parallel replicas: its ranks process different rows and hold copies of all parameters."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.cases.axes.axis import Axis, Divided, ViewName
from moeverify.cases.schema import Layout
from moeverify.results.checks import Kind


def _views(layout: Layout) -> Sequence[ViewName]:
    # DDP shards nothing, so experts borrow the replicas themselves: edp replaces them in the sparse view.
    return ("data", "dense") if layout.data_parallel == "ddp" else ("data", "dense", "sparse")


AXIS = Axis(
    name="dp_replicate",
    degree="dp_replicate",
    size=lambda layout: layout.dp_replicate,
    views=_views,
    batch_dim="rows",
    divides=Divided(Kind.TOKEN_LOSS),
    custom_models="wrapped",
    is_varied=True,
)
