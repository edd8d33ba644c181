"""The table of `ls`, and the notes below it about ranks that are not stopped."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Any

from multiprocessing_pdb.console.broadcast import Answer
from multiprocessing_pdb.console.target import Target, read_name, read_number, read_text

_LINES = re.compile(r"[\r\n\t]+")
_HEADS = ("rank", "host", "pid", "mesh", "at", "reason", "since")


def show_duration(seconds: float) -> str:
    """Return minutes and seconds, with hours if needed."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02d}:{rest % 60:02d}"
    return f"{hours}:{text}" if hours else text


def _shorten(path: str) -> str:
    short = os.path.relpath(path) if path.startswith("/") else path
    return short if len(short) < len(path) and not short.startswith("../..") else path


def _make_row(answer: Answer) -> tuple[str, ...]:
    target = answer.target
    info = target.info
    mesh = " ".join(f"{axis}={at}" for axis, at in target.coordinates.items())
    state = target.state
    if answer.failure:
        place, since = answer.failure, ""
    elif state == "armed":
        place, since = f"{_shorten(target.place)} (runs)", ""
    elif state == "running":
        place = "running (a step or breakpoint stops it)"
        since = show_duration(read_number(info, "lasting") or 0)
    else:
        place = _shorten(target.place)
        if state == "busy":
            place += f" (busy for {read_number(info, 'lasting') or 0:.1f} s)"
        since = show_duration(read_number(info, "stopped") or 0)
    pid = read_number(info, "pid")
    return (
        target.label,
        read_text(info, "host"),
        f"{pid:.0f}" if pid is not None else "",
        mesh,
        place,
        read_text(info, "reason"),
        since,
    )


def show_table(answers: Sequence[Answer]) -> str:
    """Return the table of `ls`, without columns that are empty for all ranks."""
    rows = [_make_row(answer) for answer in answers]
    kept = [at for at in range(len(_HEADS)) if any(row[at] for row in rows)]
    return format_table([_HEADS[at] for at in kept], [[row[at] for at in kept] for row in rows])


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table. Every cell is reduced to one line, since ranks can send any text."""
    from tabulate import tabulate  # a quarter of a console's start, which most commands do without

    cells = [[_LINES.sub(" ", cell) for cell in row] for row in rows]
    text = tabulate(cells, heads, tablefmt="plain", disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def show_countdowns(targets: Sequence[Target], armed: Sequence[dict[str, Any]]) -> list[str]:
    """Return notes on collectives: those in flight whose timeout cannot be raised, and unarmed peers."""
    lines = []
    stopped = {read_number(target.info, "pid") for target in targets}
    jobs = {target.job for target in targets}
    waiting = [record for record in armed if record.get("job") in jobs and record.get("pid") not in stopped]
    for record in waiting:
        flight = record.get("in_flight")
        name = f"rank {read_name(record, 'label')}"
        if isinstance(flight, dict):
            left = (read_number(flight, "deadline") or 0.0) - time.time()
            what = f"{name} waits in {read_text(flight, 'what')}, begun before its timeout could be raised"
            ends = f"ends in {show_duration(left)} at the latest" if left > 0 else "its time is over"
            lines.append(f"{what}: it cannot be saved, and {ends}")
    limits = [limit for t in targets if (limit := read_number(t.info, "limit")) is not None]
    worlds = [world for t in targets if (world := read_number(t.info, "world")) is not None]
    unarmed = max(worlds, default=0) - len({t.number for t in targets}) - len(waiting)
    if limits and unarmed > 0:
        since = max(read_number(t.info, "stopped") or 0.0 for t in targets)
        left = min(limits) - since
        ends = (
            f"{show_duration(left)} left for those that wait since the stop" if left > 0 else "that is over"
        )
        lines.append(
            f"{unarmed} rank(s) neither stopped nor armed here: a collective of theirs that waits for a"
            f" stopped rank ends after {show_duration(min(limits))}, {ends}"
        )
    return lines
