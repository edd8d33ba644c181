"""Rules on users' own models and parallel code."""

from __future__ import annotations

import pytest

FOREIGN = "recipe: {{model: {{factory: 'mine:make', vocab_size: 97}}}}\nlayout: {{{}}}\n"


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate: 2, data_parallel: ddp",
        "dp_shard: 2",
        "dp_replicate: 2, dp_shard: 2",
        "dp_shard: 2, data_parallel: fsdp1",
        "tp: 2, parallelize: 'mine:divide'",
        "dp_shard: 2, ep: 2, cp: 3, parallelize: 'mine:divide'",
        "dp_replicate: 2, tp: 2, data_parallel: ddp, parallelize: 'mine:divide'",
        "dp_shard: 2, tp: 2, data_parallel: fsdp1, parallelize: 'mine:divide'",
    ],
)
def test_foreign_model_under_a_layout_that_can_be_run(write, find_problems, layout):
    assert find_problems(write("case.yaml", FOREIGN.format(layout))) == []


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_foreign_model_is_not_divided_by_us(write, find_problems, axis):
    [problem] = find_problems(write("case.yaml", FOREIGN.format(f"{axis}: 2")))
    assert (problem.path, problem.line) == (f"layout.{axis}", 2)
    assert problem.message == f"{axis} 2 of a model with a `factory` needs your own function"
    assert 'parallelize: "package.module:function"' in problem.remedy


def test_foreign_model_is_not_cut_into_stages(write, find_problems):
    [problem] = find_problems(write("case.yaml", FOREIGN.format("pp: 2, micro_batches: 2")))
    assert problem.message == "pp 2 of a model with a `factory` is not supported"
    text = FOREIGN.format("pp: 2, micro_batches: 2, parallelize: 'mine:divide'")
    [problem] = find_problems(write("case.yaml", text))
    assert problem.message == "pp together with `parallelize` is not supported"


@pytest.mark.parametrize("backend", ["grouped_mm", "megablocks"])
@pytest.mark.parametrize("own", ["", ", parallelize: 'mine:divide'"])
def test_foreign_model_computes_its_experts_itself(write, find_problems, backend, own):
    text = FOREIGN.format(f"dp_shard: 2, experts: {backend}{own}")
    [problem] = find_problems(write("case.yaml", text))
    assert (problem.path, problem.line) == ("layout.experts", 2)
    assert problem.message == f"experts `{backend}` has no effect on a model with a `factory`"
    assert "remove it" in problem.remedy


def test_foreign_model_with_experts_that_we_do_not_know(write, find_problems):
    [problem] = find_problems(write("case.yaml", FOREIGN.format("dp_shard: 2, ep: 2")))
    assert problem.path == "layout.ep"


def test_batch_and_mesh_are_judged_with_a_function_of_the_user_too(write, find_problems):
    layout = "dp_shard: 3, ep: 2, parallelize: 'mine:divide'"
    problems = find_problems(write("case.yaml", FOREIGN.format(layout)))
    assert [problem.path for problem in problems] == ["layout.dp_shard", "layout.ep"]
