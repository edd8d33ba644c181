"""The pictures of a case, in the order of a page. A picture is a name here and a file of that name with `draw`."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.report.pictures import curves, heat_map, limits, load, mesh, ratios
from moeverify.report.pictures.picture import Picture, drawing
from moeverify.results.run import CaseResult

_PICTURES = {
    "heat-map": heat_map.draw,
    "mesh": mesh.draw,
    "ratios": ratios.draw,
    "curves": curves.draw,
    "load": load.draw,
    "limits": limits.draw,
}


def draw_case(case: CaseResult) -> Iterator[tuple[str, Picture]]:
    """Yield the name and the picture of all that the result of a case has data for."""
    with drawing():
        drawn = [(name, draw(case)) for name, draw in _PICTURES.items()]
    for name, picture in drawn:
        if picture is not None:
            yield name, picture
