"""The pictures of the HTML page as PNG files in a folder."""

from __future__ import annotations

import re
from pathlib import Path

from moeverify.report.files import write_atomically
from moeverify.report.pictures import step, sweep
from moeverify.report.pictures.picture import drawing, format_png
from moeverify.report.pictures.registry import draw_case, draw_run
from moeverify.results.measurement import BenchRun, Measurement
from moeverify.results.run import RunResult

# A picture takes up to a second, so large runs are limited to their first cases.
_MOST_CASES = 100


def write(run: RunResult, folder: Path) -> None:
    """Write `CASE.PICTURE.png` for each failed case, or for all cases if none failed.

    At most 100 cases are drawn. Pictures of the whole run are named `PICTURE.png`. Each file is written
    atomically.

    Raises: OSError when writing fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = [case for case in run.cases if case.has_failed]
    used: set[str] = set()
    for name, picture in draw_run(run):
        write_atomically(folder / f"{name}.png", format_png(picture))
    for case in (failed or run.cases)[:_MOST_CASES]:
        stem = make_stem(case.name, used)
        for name, picture in draw_case(case):
            write_atomically(folder / f"{stem}.{name}.png", format_png(picture))


def write_sweep(result: BenchRun, folder: Path) -> None:
    """Write a sweep of `moeverify bench` as `sweep.png`.

    Raises: OSError when writing fails.
    """
    with drawing():
        picture = sweep.draw(result.cases)
    if picture is not None:
        write_atomically(folder / "sweep.png", format_png(picture))


def write_step(case: Measurement, folder: Path) -> None:
    """Write the profiled step of a case as `step.png`.

    Raises: OSError when writing fails.
    """
    with drawing():
        picture = step.draw(case)
    if picture is not None:
        write_atomically(folder / "step.png", format_png(picture))


def make_stem(name: str, used: set[str]) -> str:
    """Return a portable file name for a case, made unique within `used`."""
    plain = re.sub(r"[^A-Za-z0-9_.=+-]", "_", name)[:100].lstrip(".") or "case"
    stem = plain
    while stem.lower() in used:
        stem = f"{plain}-{len(used)}"
    used.add(stem.lower())
    return stem
