"""The pictures of a case and of a run, in page order. Each is a name here and a module with `draw`."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.report.matrix import find_matrices
from moeverify.report.pictures import (
    curves,
    heat_map,
    last_collectives,
    limits,
    load,
    mesh,
    ratios,
    reshard_matrix,
    timeline,
)
from moeverify.report.pictures.picture import Picture, drawing
from moeverify.results.run import CaseResult, RunResult

_PICTURES = {
    "heat-map": heat_map.draw,
    "mesh": mesh.draw,
    "last-collectives": last_collectives.draw,
    "ratios": ratios.draw,
    "timeline": timeline.draw,
    "curves": curves.draw,
    "load": load.draw,
    "limits": limits.draw,
}


def draw_case(case: CaseResult) -> Iterator[tuple[str, Picture]]:
    """Yield the name and picture of everything the result of a case has data for."""
    with drawing():
        drawn = [(name, draw(case)) for name, draw in _PICTURES.items()]
    for name, picture in drawn:
        if picture is not None:
            yield name, picture


def draw_run(run: RunResult) -> Iterator[tuple[str, Picture]]:
    """Yield the name and picture of the matrices of `moeverify reshard`."""
    with drawing():
        drawn = [reshard_matrix.draw(matrix) for matrix in find_matrices(run.cases)]
    for number, picture in enumerate(drawn, start=1):
        yield (f"reshard-{number}" if len(drawn) > 1 else "reshard"), picture
