"""Print the mesh, the groups and the losses of the tutorial's layouts side by side.

moeverify run examples/tutorial --json runs/tutorial.json
python examples/tutorial/side_by_side.py runs/tutorial.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tabulate import tabulate

from moeverify.cases.validation.load import load_cases
from moeverify.verification.controller.mesh import make_shape


def main(path: Path) -> None:
    results = {case["name"]: case for case in json.loads(path.read_text())["cases"]}
    cases = [case for case in load_cases([Path(__file__).parent]) if results[case.name]["losses"]]
    places = []
    for case in cases:
        shape = make_shape(case.layout)
        groups = "; ".join(
            f"{axis}: {' | '.join(','.join(map(str, group)) for group in of_axis)}"
            for axis, of_axis in shape.groups.items()
            if axis in shape.axes
        )
        axes = " x ".join(f"{axis} {size}" for axis, size in shape.axes.items())
        places.append((case.name, axes, groups, results[case.name]["verdict"]))
    sys.stdout.write(tabulate(places, headers=("case", "mesh", "groups", "verdict")) + "\n\n")
    losses = {case.name: results[case.name]["losses"] for case in cases}
    golden = next(iter(losses.values()))
    rows = [
        (step, f"{golden[step][0]:.7f}", *(f"{pairs[step][1]:.7f}" for pairs in losses.values()))
        for step in range(len(golden))
    ]
    table = tabulate(rows, headers=("step", "one device", *losses), disable_numparse=True)
    sys.stdout.write(f"{table}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
