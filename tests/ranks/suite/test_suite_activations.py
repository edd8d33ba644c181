"""Outputs of blocks equal the golden's under any sharding, and the first block that is wrong is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = """\
model: {preset: tiny-mixtral-8x7b}
data: {batch: 4, seq_len: 8}
steps: 1
"""
CASE = "recipe: blocks\nlayout: {layout}\nchecks: {{also: [activations]}}\n"
LAYOUTS = {
    "fsdp2": "{dp_shard: 2, micro_batches: 2, recompute: true}",
    "tp": "{tp: 2, sequence_parallel: true}",
    "cp": "{cp: 2, ep: 2}",
    "pp": "{pp: 2, micro_batches: 2}",
}


def run(tmp_path: Path, make_project: Callable[..., Any], *arguments: str) -> dict[str, Any]:
    project = make_project(tmp_path)
    (tmp_path / "cases" / "recipes" / "blocks.yaml").write_text(RECIPE)
    for name, layout in LAYOUTS.items():
        project.write_case(name, CASE.format(layout=layout))
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    project.variables["PYTHONPATH"] = path
    _, cases = project.run("cases", *arguments)
    assert set(cases) == set(LAYOUTS)
    return dict(cases)


def test_outputs_of_blocks_are_those_of_one_device(tmp_path: Path, make_project: Callable[..., Any]) -> None:
    for case in run(tmp_path, make_project).values():
        checks = {check["name"]: check for check in case["checks"]}
        assert case["verdict"] == "pass", case
        assert checks["activations"]["tensors"] >= 2


def test_the_first_block_that_diverges_is_named(tmp_path: Path, make_project: Callable[..., Any]) -> None:
    for case in run(tmp_path, make_project, "--fault", "suite_faults:change_second_block").values():
        wrong = [finding for finding in case["findings"] if finding["check"] == "activations"]
        assert [finding["tensor"] for finding in wrong if not finding["follows"]] == ["layers.1"]
        assert wrong[0]["place"]["module"] == "layers.1"
        assert "layers.1" in wrong[0]["cause"]
