"""A plan as an SVG picture: the load of every rank in every layer, before and after, as colours."""

from __future__ import annotations

from moeverify.tools.placement.plan import PlacementPlan
from moeverify.tools.placement.sharing import FloatArray

_CELL = 12
_LEFT, _TOP, _GAP = 64, 44, 48
_FULL_COLOUR = 2.0  # times the mean


def draw_plan(plan: PlacementPlan) -> str:
    """Return an SVG document: one row per MoE layer, one column per rank, red above the mean, blue below."""
    layers, num_ranks = plan.trace.header.layers, plan.cluster.num_ranks
    width = _LEFT + 2 * num_ranks * _CELL + _GAP + 16
    height = _TOP + len(layers) * _CELL + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, layer in enumerate(layers):
        y = _TOP + row * _CELL + _CELL - 2
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">layer {layer}</text>')
    for position, (title, side) in enumerate((("before", plan.before), ("after", plan.after))):
        x = _LEFT + position * (num_ranks * _CELL + _GAP)
        parts.append(f'<text x="{x}" y="18">{title}: balancedness {side.cost.balancedness:.4f}</text>')
        parts.append(f'<text x="{x}" y="34" fill="#666">ranks 0 to {num_ranks - 1}</text>')
        parts += _draw_cells(side.cost.loads, side.cost.mean, x)
    y = height - 12
    legend = f"white: the mean of the layer; red: {_FULL_COLOUR:g} times that or more; blue: nothing"
    parts.append(f'<text x="{_LEFT}" y="{y}" fill="#666">{legend}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _draw_cells(loads: FloatArray, mean: FloatArray, x: int) -> list[str]:
    return [
        f'<rect x="{x + rank * _CELL}" y="{_TOP + row * _CELL}" width="{_CELL - 1}" height="{_CELL - 1}" '
        f'fill="{_colour(load / max(float(mean[row]), 1e-300))}"><title>rank {rank}: {load:.0f}</title></rect>'
        for row, values in enumerate(loads.tolist())
        for rank, load in enumerate(values)
    ]


def _colour(ratio: float) -> str:
    """Return white for 1, deeper red above, deeper blue below."""
    if ratio >= 1:
        other = round(255 * (1 - min((ratio - 1) / (_FULL_COLOUR - 1), 1.0)))
        return f"#ff{other:02x}{other:02x}"
    other = round(255 * max(ratio, 0.0))
    return f"#{other:02x}{other:02x}ff"
