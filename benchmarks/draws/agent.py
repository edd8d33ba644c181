"""Measures how far a program gets by the packaged skill alone: a case, its short JSON, and the commands of `next`.

    python benchmarks/draws/agent.py --out runs/agent p24 p32 p47

As the skill says, it takes the lines of the first finding; without lines it runs the commands of `next` one by one
until one shows lines. A row has the commands that it took, the lines shown, and how many of them are the bug's.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loader import BUILTIN, PLANTS, ROOT, STACKS, Line, Plant, choose, load_plants
from run import copy_recipes, write_case
from tabulate import tabulate

LINE = re.compile(r"(.+?):(\d+)(?:: |$)")


def ask(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the short JSON of a command, or nothing where it prints none."""
    path = os.pathsep.join(map(str, (ROOT, STACKS, PLANTS)))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *command, "--json-brief"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"stderr": done.stderr}


def list_lines(answer: dict[str, Any]) -> list[tuple[str, int]]:
    """Return file and number of the lines of the first finding."""
    findings = [each for case in answer.get("cases", ()) for each in case.get("findings", ())]
    texts = findings[0].get("lines", ()) if findings else ()
    return [(found[1], int(found[2])) for text in texts if (found := LINE.match(text))]


def follow(plant: Plant, out: Path) -> list[str]:
    """Return a row: the plant, how many commands were run, the lines, and how many of them are the bug's."""
    assert plant.truth is not None
    case = write_case(plant, out / "cases" / plant.stack)
    kept = out / plant.id
    again = (
        ["report", str(kept)]
        if (kept / "result.json").is_file()
        else [plant.way, str(case), "--out", str(kept)]
    )
    answer = ask(["moeverify", *again], out)
    lines, num_commands, left = list_lines(answer), 1, answer.get("next", [])
    while not lines and left:
        step, *left = left
        lines = list_lines(ask(shlex.split(step["command"]), out))
        num_commands += 1
    is_bug = [any(each.covers(*line) for each in plant.truth.lines) for line in lines]
    is_near = [any(each.covers(*line) for each in list_functions(plant)) for line in lines]
    place = "none" if not any(is_bug) else str(1 + is_bug.index(True))
    shown = ", ".join(f"{Path(file).name}:{number}" for file, number in lines)
    counts = f"{sum(is_bug)}, near {sum(is_near) - sum(is_bug)}, of {len(lines)}"
    return [plant.id, answer.get("verdict", "none"), str(num_commands), place, counts, shown]


def list_functions(plant: Plant) -> list[Line]:
    """Return the innermost functions around the lines of a bug."""
    assert plant.truth is not None
    found = []
    for line in plant.truth.lines:
        path = (PLANTS if plant.stack == BUILTIN else STACKS) / line.file
        spans = [
            Line(line.file, node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.lineno <= line.first <= (node.end_lineno or 0)
        ]
        found.append(max(spans, key=lambda span: span.first, default=line))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="+", help="ids or globs of plants")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    plants = [each for each in choose(load_plants(), options.ids, clean=False) if each.way != "watch"]
    copy_recipes(plants, out)
    rows = []
    for plant in plants:
        rows.append(follow(plant, out))
        print("  ".join(rows[-1]), flush=True)
    headers = ["plant", "verdict", "commands", "first of the bug's", "the bug's", "lines"]
    print(tabulate(rows, headers, disable_numparse=True))
    return sum(row[3] == "none" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
