"""Console output of a device mesh: axes, the coordinates and data of each rank, groups of each axis."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import new_table, print_lines, print_table
from moeverify.report.numbers import format_count, format_range
from moeverify.results.mesh import MeshPicture


def render(picture: MeshPicture, console: Console) -> None:
    """Print the axes, a table of the ranks, and one line per axis with its groups."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in picture.axes.items()) or "one device"
    title = Text.assemble((picture.name, "bold"), f"  {format_count(len(picture.ranks), 'rank')}: {sizes}")
    if picture.borrowed:
        title.append("; borrowed: " + ", ".join(f"{axis} {size}" for axis, size in picture.borrowed.items()))
    print_lines(console, title)
    console.print()
    print_table(_make_table(picture, console), console)
    console.print()
    if any(len(groups) > 0 for groups in picture.groups.values()):
        print_lines(console, Text("groups, as ranks", style="bold"))
    width = max((len(axis) for axis in picture.groups), default=0)
    for axis, groups in picture.groups.items():
        members = " | ".join(format_range(group) for group in groups)
        links = f"  ({_describe_links(picture, groups)})" if picture.per_node else ""
        print_lines(console, Text(f"  {axis:<{width}}  {members}{links}"))


def _describe_links(picture: MeshPicture, groups: tuple[tuple[int, ...], ...]) -> str:
    """Return whether the groups of an axis stay inside a node, where links are fast."""
    spans = [len(picture.find_nodes(group)) for group in groups]
    num_across = sum(span > 1 for span in spans)
    if not num_across:
        return "inside a node"
    share = "" if num_across == len(spans) else f"{num_across} of {len(spans)} groups "
    return f"{share}across {format_range({span for span in spans if span > 1})} nodes"


def _make_table(picture: MeshPicture, console: Console) -> Table:
    """Return a table with one row per rank; optional columns appear only if some rank has a value."""
    table = new_table(console)
    axes = [*picture.axes, *picture.borrowed]
    kinds = list(dict.fromkeys(name for place in picture.ranks for name in place.holds))
    table.add_column("rank", justify="right", no_wrap=True)
    if picture.per_node:
        table.add_column("node", justify="right", no_wrap=True)
    for axis in axes:
        table.add_column(axis, justify="right", no_wrap=True)
    with_rows = any(place.rows for place in picture.ranks)
    with_positions = any(place.positions for place in picture.ranks)
    for header in ("rows",) * with_rows + ("positions",) * with_positions + tuple(kinds):
        table.add_column(header, overflow="fold")
    for place in picture.ranks:
        node = [str(place.rank // picture.per_node)] if picture.per_node else []
        cells = [str(place.rank), *node, *(str(place.coordinates.get(axis, "-")) for axis in axes)]
        cells += [format_range(place.rows)] * with_rows + [format_range(place.positions)] * with_positions
        cells += [format_range(place.holds.get(name, ())) or "-" for name in kinds]
        table.add_row(*(Text(cell) for cell in cells))
    return table
