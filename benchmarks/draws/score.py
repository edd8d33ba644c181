"""Scores what was said of planted bugs by data: the lines, kind, tensors and axes of the leading finding.

    python benchmarks/draws/score.py runs/draws [--precision bfloat16] [--json rows.json] [--compare OLD.json]

| Verdict | Meaning |
|---|---|
| right | the leading claim names a wrong line; or its kind, tensors and axes are true, and so are all its lines |
| line | a wrong line is shown anywhere in the leading finding |
| place | the module or tensor of the leading finding is right, and no cause is claimed |
| wrong | a cause is claimed, and neither its lines nor its kind, tensors and axes are those of the truth |
| none | nothing of it |

`near` counts the reports that show a line within three of a wrong one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from claims import Claim, Lines, read_claims
from loader import KINDS, Plant, Truth, choose, load_plants
from run import hash_sources
from tabulate import tabulate

_NEAR = 3
VERDICTS = ("right", "line", "place", "wrong", "none")


@dataclass(frozen=True)
class Row:
    """The outcome of one plant; `detected` is False when the case passed."""

    id: str
    stack: str
    kind: str
    held: bool
    precision: str
    detected: bool
    verdict: str
    seconds: float
    claim: str = ""
    is_near: bool = False
    is_stale: bool = False


def judge(truth: Truth, claims: Sequence[Claim]) -> str:
    """Return the verdict on the claims, the leading claim first."""
    if not claims:
        return "none"
    lead = claims[0]
    if names_line(truth, lead.lines) or _names_cause(truth, lead):
        return "right"
    if names_line(truth, lead.shown):
        return "line"
    if not lead.is_location_only:
        return "wrong"
    return "place" if names_tensors(truth, lead.tensors) else "none"


def names_line(truth: Truth, lines: Lines) -> bool:
    """Return whether some lines include a wrong one."""
    return any(line.covers(file, number) for line in truth.lines for file, number in lines)


def is_near(truth: Truth, claims: Sequence[Claim]) -> bool:
    """Return whether the leading claim shows a line near a wrong one."""
    lines = [replace(line, first=line.first - _NEAR, last=line.last + _NEAR) for line in truth.lines]
    return bool(claims) and names_line(replace(truth, lines=tuple(lines)), claims[0].shown)


def names_tensors(truth: Truth, names: Sequence[str]) -> bool:
    """Return whether at least half of some names are names of culprits."""
    hits = sum(any(fnmatch(name, pattern) for pattern in truth.tensors) for name in names)
    return hits > 0 and 2 * hits >= len(names)


def _names_cause(truth: Truth, claim: Claim) -> bool:
    if claim.is_location_only or claim.kind not in truth.kinds:
        return False
    own = [line for line in claim.lines if truth.owns(line) and line not in claim.callers]
    if not all(any(known.covers(*line) for known in truth.counterparts) for line in own):
        return False
    return names_tensors(truth, claim.tensors) and set(truth.axes) <= set(claim.axes)


def score(out: Path, plants: Sequence[Plant], precision: str) -> list[Row]:
    """Return a row for each plant that has a result in that precision."""
    rows = []
    for plant in plants:
        path = out / "results" / f"{plant.id}--{precision}.json"
        if plant.truth is None or not path.is_file():
            continue
        record = json.loads(path.read_text())
        detected = record["verdict"] in ("mismatch", "error")
        claims = read_claims(record) if detected else []
        rows.append(
            Row(
                id=plant.id,
                stack=plant.stack,
                kind=plant.truth.kind,
                held=plant.held,
                precision=precision,
                detected=detected,
                verdict=judge(plant.truth, claims) if detected else "none",
                seconds=record["seconds"],
                claim=_describe(claims[0]) if claims else record["verdict"],
                is_near=is_near(plant.truth, claims),
                is_stale=record.get("sources") != hash_sources(plant.stack),
            )
        )
    return rows


def _describe(claim: Claim) -> str:
    lines = ", ".join(f"{Path(file).name}:{number}" for file, number in claim.lines[:3])
    kind = (claim.kind or "?") + (" (place)" if claim.is_location_only else "")
    names = ", ".join(claim.tensors[:2]) + (" ..." if len(claim.tensors) > 2 else "")
    return "; ".join(filter(None, [kind, names, " ".join(claim.axes), lines]))


def make_totals(rows: Sequence[Row], key: Callable[[Row], str], order: Sequence[str] = ()) -> list[list[str]]:
    """Return a row of the table of totals for each value of a key, and one for all."""
    values = [value for value in order if any(key(row) == value for row in rows)]
    values += sorted({key(row) for row in rows} - set(values))
    table = [_make_total(value, [row for row in rows if key(row) == value]) for value in values]
    return [*table, _make_total("all", rows)]


def _make_total(name: str, rows: Sequence[Row]) -> list[str]:
    counts = [sum(row.verdict == verdict for row in rows) for verdict in VERDICTS]
    share = f"{100 * counts[0] / len(rows):.0f} %" if rows else ""
    near = sum(row.is_near for row in rows)
    return [name, str(len(rows)), str(sum(row.detected for row in rows)), *map(str, counts), str(near), share]


def compare(rows: Sequence[Row], old: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return (plant, before, now) of the plants whose verdict or detection has changed."""
    before = {(str(row["id"]), str(row["precision"])): row for row in old}
    changed = []
    for row in rows:
        was = before.get((row.id, row.precision))
        if was is None:
            changed.append([row.id, "-", _name(asdict(row)), row.claim])
        elif (was["verdict"], was["detected"]) != (row.verdict, row.detected):
            changed.append([row.id, _name(was), _name(asdict(row)), row.claim])
    return changed


def _name(row: Mapping[str, object]) -> str:
    return str(row["verdict"]) if row["detected"] else "missed"


def main() -> None:
    """Print rows and totals, and write or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the folder that run.py has written")
    parser.add_argument("--only", nargs="*", default=[], metavar="ID")
    parser.add_argument("--stack", nargs="*", default=[])
    parser.add_argument("--precision", default="float64")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="print what has changed since these rows")
    parser.add_argument("--totals", action="store_true", help="print no row for each plant")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--held", action="store_const", const="held", dest="group")
    group.add_argument("--open", action="store_const", const="open", dest="group")
    options = parser.parse_args()
    plants = choose(load_plants(options.stack), options.only, clean=False, group=options.group or "")
    rows = score(options.out, plants, options.precision)
    stale = [row.id for row in rows if row.is_stale]
    if stale:
        print(f"{len(stale)} results are of other code of their stack, run these again: {' '.join(stale)}\n")
    if not options.totals:
        table = [
            [row.id, row.kind, "held" if row.held else "", _name(asdict(row)), row.claim[:120]]
            for row in rows
        ]
        print(tabulate(table, ["plant", "kind", "", "verdict", "claim"], disable_numparse=True), "\n")
    head = ["plants", "detected", *VERDICTS, "near", "right"]
    for title, chosen in (("open", False), ("held", True)):
        part = [row for row in rows if row.held == chosen]
        if not part:
            continue
        by_stack = make_totals(part, lambda row: row.stack)
        by_kind = make_totals(part, lambda row: row.kind, KINDS)
        print(tabulate(by_stack, [title, *head], disable_numparse=True), "\n")
        print(tabulate(by_kind, [title, *head], disable_numparse=True), "\n")
    print(tabulate([_make_total("all", rows)], ["", *head], disable_numparse=True))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.compare is not None:
        changed = compare(rows, json.loads(options.compare.read_text()))
        print(f"\n{len(changed)} changed since {options.compare}:")
        print(tabulate(changed, ["plant", "before", "now", "claim"], disable_numparse=True))


if __name__ == "__main__":
    main()
