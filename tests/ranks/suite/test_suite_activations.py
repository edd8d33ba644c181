"""Outputs of blocks equal the golden's under any sharding, and the first wrong block is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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


FAULT = "change_second_block"


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory,
    make_project: Callable[..., Any],
    run_with_faults: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Return each layout without and with the fault."""
    project = make_project(tmp_path_factory.mktemp("activations"))
    (project.folder / "cases" / "recipes" / "blocks.yaml").write_text(RECIPE)
    for name, layout in LAYOUTS.items():
        project.write_case(name, CASE.format(layout=layout))
        project.write_case(f"{name}-{FAULT}", CASE.format(layout=layout))
    return run_with_faults(project, {f"{name}-{FAULT}": FAULT for name in LAYOUTS})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_of_blocks_are_those_of_one_device(cases: dict[str, Any], layout: str) -> None:
    case = cases[layout]
    checks = {check["name"]: check for check in case["checks"]}
    assert case["verdict"] == "pass", case
    assert checks["activations"]["tensors"] >= 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_block_that_diverges_is_named(cases: dict[str, Any], layout: str) -> None:
    findings = cases[f"{layout}-{FAULT}"]["findings"]
    wrong = [finding for finding in findings if finding["check"] == "activations"]
    assert [finding["tensor"] for finding in wrong if not finding["follows"]] == ["layers.1"]
    assert wrong[0]["place"]["module"] == "layers.1"
    assert "layers.1" in wrong[0]["cause"]
