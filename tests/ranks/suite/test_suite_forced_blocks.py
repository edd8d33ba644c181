"""Blocks on the golden's inputs and output gradients: right under any sharding; errors stay local."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RECIPE = """\
model: {preset: tiny-mixtral-8x7b, num_layers: 4}
data: {batch: 4, seq_len: 8}
steps: 1
"""
CASE = "recipe: {recipe}\nlayout: {layout}\nchecks: {{also: [forced_blocks], repeat: never}}\n"
LAYOUTS = {
    "ddp": "{dp_replicate: 2, data_parallel: ddp, ep: 2}",
    "fsdp1": "{dp_shard: 2, data_parallel: fsdp1}",
    "fsdp2": "{dp_shard: 2, micro_batches: 2, recompute: true}",
    "tp": "{tp: 2}",
    "tp-sp": "{tp: 2, sequence_parallel: true, loss_parallel: true, ep: 2}",
    "cp": "{cp: 2, ep: 2}",
    "pp": "{pp: 2, micro_batches: 2}",
    "pp-empty-stage": "{pp: 2, micro_batches: 4, stage_layers: [0, 1, 2, 1], pipeline_schedule: interleaved_1f1b}",
    "pp-zbv": "{pp: 2, micro_batches: 4, stage_layers: [1, 1, 1, 1], pipeline_schedule: zbv}",
}
FAULTS = {
    "change_second_block": "layers.1 output",
    "change_gradient_of_second_block": "layers.1 gradient of its input",
}
# Outputs and gradients are forced by one hook each: each fault runs where it is sharded, and in a pipeline.
PLANTED = [("tp-sp", "change_second_block"), *(("pp", fault) for fault in FAULTS)]
PLANTED += [("fsdp2", "change_gradient_of_second_block")]


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory,
    make_project: Callable[..., Any],
    run_with_faults: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Return each layout without faults, some with faults, and one in bfloat16 with and without the check."""
    project = make_project(tmp_path_factory.mktemp("forced-blocks"))
    recipes = project.folder / "cases" / "recipes"
    (recipes / "blocks.yaml").write_text(RECIPE)
    (recipes / "narrow.yaml").write_text(f"{RECIPE}precision: bfloat16\n")
    for name, layout in LAYOUTS.items():
        project.write_case(name, CASE.format(recipe="blocks", layout=layout))
    for name, fault in PLANTED:
        project.write_case(f"{name}-{fault}", CASE.format(recipe="blocks", layout=LAYOUTS[name]))
    forced = CASE.format(recipe="narrow", layout=LAYOUTS["fsdp2"])
    project.write_case("narrow", forced)
    project.write_case("narrow-free", forced.replace("also: [forced_blocks], ", ""))
    return run_with_faults(project, {f"{name}-{fault}": fault for name, fault in PLANTED})


def find_check(case: dict[str, Any], name: str) -> dict[str, Any]:
    return next(check for check in case["checks"] if check["name"] == name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_block_is_that_of_one_device(cases: dict[str, Any], layout: str) -> None:
    case = cases[layout]
    assert case["verdict"] == "pass", case["findings"][:2]
    # Embedding and four blocks, each with its output and that output's gradient.
    assert find_check(case, "forced blocks")["tensors"] == 2 * 5


@pytest.mark.parametrize(("layout", "fault"), PLANTED)
def test_an_error_is_found_in_its_block_and_reaches_no_other(
    cases: dict[str, Any], layout: str, fault: str
) -> None:
    case = cases[f"{layout}-{fault}"]
    wrong = [finding for finding in case["findings"] if finding["check"] == "forced blocks"]
    # A factor on an output also scales its gradient, and the block passes that on.
    assert wrong[0]["tensor"] == FAULTS[fault]
    assert {finding["tensor"] for finding in wrong} <= set(FAULTS.values())
    assert wrong[0]["place"]["module"] == "layers.1"
    names = [finding["tensor"] for finding in case["findings"]]
    assert {name.split(".")[1].split()[0] for name in names if name.startswith("layers.")} == {"1"}
    assert not any(finding["check"] == "loss" for finding in case["findings"])


def test_the_bounds_of_gradients_are_those_of_one_block(cases: dict[str, Any]) -> None:
    assert {cases[name]["verdict"] for name in ("narrow", "narrow-free")} == {"pass"}
    forced, free = (find_check(cases[name], "gradient")["limits"] for name in ("narrow", "narrow-free"))
    assert forced["median"] < 0.85 * free["median"]
