"""A plan as console text: loads before and after, the bound, bars by rank, and the matrix."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from moeverify.tools.placement.plan import PlacementPlan, Side
from moeverify.tools.placement.sharing import FloatArray

_BAR_WIDTH = 32
_MOST_BARS = 16  # ranks; with more, the heaviest and lightest ones are shown
_MOST_LAYERS = 12  # rows of the table by layer
_MOST_NAMED = 1024  # experts in printed matrices; the file of --out has all


def print_plan(plan: PlacementPlan, console: Console, *, name: str) -> None:
    """Print a plan; `name` is the name of its trace."""
    for line in _list_lines(plan, name):
        console.print(line.rstrip(), soft_wrap=True)


def _list_lines(plan: PlacementPlan, name: str) -> list[str]:
    return [
        *_describe(plan, name),
        "",
        *_compare(plan),
        "",
        *_list_layers(plan),
        "",
        *_draw_bars(plan),
        "",
        *_list_matrices(plan),
    ]


def _describe(plan: PlacementPlan, name: str) -> list[str]:
    """Return the lines about the inputs and the time."""
    header = plan.trace.header
    model = f" of {header.model}" if header.model else ""
    spare = plan.cluster.num_ranks * plan.num_slots - header.num_experts
    is_known = header.num_sources == plan.cluster.num_ranks > 1
    sources = "of each rank" if is_known else "the same from every rank"
    nodes = _count(plan.cluster.num_nodes, "node")
    sizes = (
        _count(len(plan.trace.steps), "step"),
        _count(len(header.layers), "MoE layer"),
        _count(header.num_experts, "expert"),
    )
    lines = [
        f"trace    {name}{model}: {', '.join(sizes)}; tokens {sources}",
        f"ranks    {plan.cluster.num_ranks} on {nodes}, {_count(plan.num_slots, 'slot')} each, {spare} spare",
        f"solver   {plan.seconds:.2f} s",
    ]
    if plan.trace.num_lost_bytes:
        lost = f"{plan.trace.num_lost_bytes} bytes"
        lines.append(f"note     the last step of the trace is cut short, and left out ({lost})")
    return lines


def _compare(plan: PlacementPlan) -> list[str]:
    """Return the table of both placements."""
    rows = [
        ("", "before", "after"),
        ("largest load, sum of layers", *(f"{_sum(side.cost.largest)}" for side in _sides(plan))),
        ("balancedness (mean / largest)", *(f"{side.cost.balancedness:.4f}" for side in _sides(plan))),
        ("  step by step", *(f"{side.steps:.4f}" for side in _sides(plan))),
        ("copies that leave their rank", *(f"{side.cost.off_rank:.1%}" for side in _sides(plan))),
    ]
    if plan.cluster.num_nodes > 1:
        rows.append(("copies that leave their node", *(f"{side.cost.off_node:.1%}" for side in _sides(plan))))
    rows.append(("replicas beyond the first", *(str(side.cost.num_replicas) for side in _sides(plan))))
    lines = _align(rows)
    lines.append("")
    lines.append(f"bound    {_sum(plan.bound)}: no placement has less; the gap to it is {plan.gap:.2%}")
    counts = plan.count_moves()
    lines.append(
        f"moves    {counts['move'] + counts['copy']} experts sent ({counts['move']} moved, {counts['copy']} copied), "
        f"{counts['drop']} dropped"
    )
    if plan.max_moves is not None and plan.gain_share is not None:
        lines.append(
            f"         at most {plan.max_moves}: {plan.gain_share:.1%} of the gain of the best placement found, "
            f"which sends {plan.best_moves}"
        )
    return lines


def _list_layers(plan: PlacementPlan) -> list[str]:
    """Return the largest load of each layer over its mean; of many layers, the worst ones."""
    mean = plan.after.cost.mean
    unit = [max(float(each), 1e-300) for each in mean]
    positions = sorted(range(len(unit)), key=lambda row: -plan.after.cost.largest[row] / unit[row])
    shown = sorted(positions[:_MOST_LAYERS])
    rows: list[tuple[str, ...]] = [("layer", "before", "after", "bound")]
    for row in shown:
        values = (plan.before.cost.largest[row], plan.after.cost.largest[row], plan.bound[row])
        rows.append((str(plan.trace.header.layers[row]), *(f"{value / unit[row]:.4f}" for value in values)))
    title = "largest load over the mean"
    if len(shown) < len(unit):
        title += f", the {len(shown)} worst of {len(unit)} layers"
    return [title, *_align(rows)]


def _draw_bars(plan: PlacementPlan) -> list[str]:
    """Return bars of the rank loads in the layer that was most uneven before."""
    before, after = plan.before.cost.loads, plan.after.cost.loads
    mean = plan.before.cost.mean
    worst = int((plan.before.cost.largest / (mean + 1e-300)).argmax())
    unit = float(mean[worst])
    scale = _BAR_WIDTH / max(float(before[worst].max()), float(after[worst].max()), 1e-300)
    ranks = list(range(plan.cluster.num_ranks))
    if len(ranks) > _MOST_BARS:
        ranks.sort(key=lambda rank: -before[worst, rank])
        ranks = ranks[: _MOST_BARS // 2] + ranks[-_MOST_BARS // 2 :]
    rows: list[tuple[str, ...]] = [("rank", "before", "", "after", "")]
    for rank in ranks:
        cells = [str(rank)]
        for loads in (before, after):
            value = float(loads[worst, rank])
            cells += [f"{value / max(unit, 1e-300):.2f}", f"{'#' * round(value * scale):<{_BAR_WIDTH}}"]
        rows.append(tuple(cells))
    layer = plan.trace.header.layers[worst]
    few = f", {len(ranks)} of {plan.cluster.num_ranks} ranks" if len(ranks) < plan.cluster.num_ranks else ""
    return [f"load by rank over the mean, layer {layer}{few}", *_align(rows, left=(2, 4))]


def _list_matrices(plan: PlacementPlan) -> list[str]:
    """Return the new placement, a line per layer, up to a limit for the screen."""
    placement = plan.after.placement
    lines: list[str] = []
    number = 0
    for layer, matrix in zip(placement.layers, placement.matrices, strict=True):
        number += sum(map(len, matrix))
        if number > _MOST_NAMED and lines:
            lines.append(f"{len(placement.layers) - len(lines)} more layers: --out FILE writes them all")
            break
        lines.append(f"layer {layer}: {[list(row) for row in matrix]}")
    return ["placement, a list for each rank", *lines]


def _sides(plan: PlacementPlan) -> tuple[Side, Side]:
    return plan.before, plan.after


def _sum(loads: FloatArray) -> str:
    return f"{float(loads.sum()):.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _align(rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> list[str]:
    """Return rows as lines with aligned columns; numbers are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            f"{cell:<{width}}" if position in left else f"{cell:>{width}}"
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
