"""A list of faults is available at once: it imports no modules for the results of runs."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys
from moeverify.faults.choice import choose_faults, describe
lines = [describe(fault) for fault in choose_faults([])]
print(json.dumps([len(lines), sorted(sys.modules)]))
"""


def test_a_list_of_faults_imports_no_results_of_runs() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    num_lines, modules = json.loads(done.stdout)
    assert num_lines > 100
    assert "moeverify.results.benchmark" in modules
    for name in (
        "torch",
        "moeverify.results.finding",
        "moeverify.results.facts",
        "moeverify.results.operation",
    ):
        assert name not in modules, name
