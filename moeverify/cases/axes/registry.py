"""All mesh axes from the outermost to the innermost, which is their order in every view."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.cases.axes import cp, dp_replicate, dp_shard, ep, etp, pp, tp
from moeverify.cases.axes.axis import Axis
from moeverify.cases.axes.derived import EDP, EFSDP, FSDP, LOSS
from moeverify.cases.schema import Layout

AXES: tuple[Axis, ...] = (
    pp.AXIS,
    LOSS,
    dp_replicate.AXIS,
    dp_shard.AXIS,
    cp.AXIS,
    FSDP,
    EDP,
    EFSDP,
    ep.AXIS,
    etp.AXIS,
    tp.AXIS,
)

AXIS_OF: Mapping[str, Axis] = {axis.name: axis for axis in AXES}

DEGREES: tuple[Axis, ...] = tuple(axis for axis in AXES if axis.degree)
"""The axes that layout fields set."""

EXPERT_AXES: tuple[str, ...] = tuple(axis.name for axis in AXES if axis.places_experts)
"""The axes that place experts and carry the tokens dispatched to them."""


def list_axes(layout: Layout, view: str) -> dict[str, int]:
    """Return the axes of a view with their sizes, the last one varying fastest."""
    return {axis.name: axis.size(layout) for axis in AXES if view in axis.views(layout)}
