"""The example cases of frameworks that need a separate environment: they run where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_cases import EXAMPLES, run_files

# The module that the cases of each folder of examples/stacks need.
MODULES = {
    "deepspeed": "deepspeed",
    "megatron": "megatron.core",
    "modalities": "modalities",
    "nemo_automodel": "nemo_automodel",
    "olmo_core": "olmo_core",
    "picotron": "picotron",
    "torchtune": "torchtune",
}


@pytest.mark.parametrize("stack", MODULES)
def test_the_examples_pass(stack: str, tmp_path: Path) -> None:
    pytest.importorskip(MODULES[stack], reason=f"{stack} has an environment of its own, see `make stacks`")
    outcomes = run_files(sorted((EXAMPLES / "stacks" / stack).glob("*.yaml")), tmp_path)
    verdicts = {name: (case.verdict, case.reason) for name, case in outcomes.results.items()}
    assert verdicts == dict.fromkeys(verdicts, ("pass", ""))
