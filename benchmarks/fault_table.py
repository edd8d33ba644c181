"""Merge the tables of `moeverify faults run` in several precisions into one, with a column per precision.

    for p in float64 float32 mixed bfloat16; do moeverify faults run --precision $p --markdown $p.md; done
    python benchmarks/fault_table.py float64.md float32.md mixed.md bfloat16.md

The result replaces the table of docs/results/faults.md. The stem of a file is the name of its column. The description
and the columns of losses are those of the first file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "faults.md"
BLOCK = re.compile(r"(<!-- table -->\n).*?(<!-- end of table -->)", re.DOTALL)
# `moeverify faults show` has the commits and owners of a source.
COMMIT = re.compile(r" \([0-9a-f]{7,40}\)")
OWNER = re.compile(r"(?<=[(;,])( ?)[A-Za-z][\w.-]+/(?=[\w.-]+ )")
VERDICTS = ("detected", "located", "cause named")


def read_rows(path: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a table by fault, each as a dict by the headers of the columns."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    headers = cells[0]
    return {row[0]: dict(zip(headers, row, strict=True)) for row in cells[1:]}


def grade(row: dict[str, str] | None) -> str:
    """Return C if the cause of a fault was named, L if it was located, D if it was detected, and `-` if not run."""
    if row is None:
        return "-"
    reached = [letter for letter, name in zip("DLC", VERDICTS, strict=True) if row[name] == "yes"]
    return reached[-1] if reached else "missed"


def merge(paths: list[Path]) -> list[str]:
    """Return the lines of the merged table."""
    tables = {path.stem: read_rows(path) for path in paths}
    first = next(iter(tables.values()))
    lines = [f"| | Bug | {' | '.join(tables)} | Shown by |", "|---" * (len(tables) + 3) + "|"]
    for name, row in first.items():
        grades = [grade(table.get(name)) for table in tables.values()]
        loss, norm = (row[key] == "sees it" for key in list(row)[6:8])
        bug = OWNER.sub(r"\1", COMMIT.sub("", row["bug"]))
        shown = "loss" if loss else "norm" if norm else ""
        lines.append(f"| {' | '.join([name, bug, *grades, shown])} |")
    return lines


def main() -> None:
    """Write the table into the page."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    table = "\n".join(merge([Path(name) for name in sys.argv[1:]]))
    PAGE.write_text(BLOCK.sub(lambda found: f"{found[1]}{table}\n{found[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
