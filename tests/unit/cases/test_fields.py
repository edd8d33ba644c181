"""Messages and positions for fields that are unknown, misplaced, missing or of the wrong type."""

from __future__ import annotations

import pytest

from moeverify.cases.suggest import MAX_LISTED, enumerate_names
from moeverify.errors import Problem


def only(problems: list[Problem], path: str) -> Problem:
    """Return the only problem, which must be about the field at `path`."""
    [problem] = problems
    assert problem.path == path
    return problem


@pytest.mark.parametrize(
    ("section", "path", "message", "remedy"),
    [
        ("layout: {dp_shrad: 2}", "layout.dp_shrad", "unknown field `dp_shrad`", "did you mean `dp_shard`?"),
        ("layout: {DP-Shard: 2}", "layout.DP-Shard", "unknown field", "did you mean `dp_shard`?"),
        ("layout: {seed: 2}", "layout.seed", "unknown field `seed`", "move it to `recipe.seed`"),
        ("layout: {precision: x}", "layout.precision", "unknown field", "move it to `recipe.precision`"),
        ("layout: {top_k: 2}", "layout.top_k", "unknown field", "move it to `recipe.model.moe.top_k`"),
        ("layout: {steps: 2}", "layout.steps", "unknown", "move it to `recipe.steps` or `checks.steps`"),
        (
            "layout: {file: x}",
            "layout.file",
            "unknown field `file`",
            "choose from `dp_replicate`, `dp_shard`",
        ),
        ("file: x", "file", "unknown field `file`", "choose from `name`, `description`"),
        ("layout: {presision: x}", "layout.presision", "unknown field", "did you mean `recipe.precision`?"),
        ("tp: 2", "tp", "unknown field `tp`", "move it to `layout.tp`"),
        ("seed: 2", "seed", "unknown field `seed`", "move it to `recipe.seed`"),
        ("preset: stress", "preset", "unknown field `preset`", "move it to `recipe.model.preset`"),
        ("layuot: {tp: 2}", "layuot", "unknown field `layuot`", "did you mean `layout`?"),
        ("layout: {1: 2}", "layout.1", "unknown field `1`", "choose from"),
        ("layout: {tp: two}", "layout.tp", "expected an integer >= 1, got `two`", ""),
        ("layout: {tp: '2'}", "layout.tp", "expected an integer >= 1, got the text `2`", ""),
        ("layout: {tp: 0}", "layout.tp", "expected an integer >= 1, got `0`", ""),
        ("layout: {tp: 1.5}", "layout.tp", "expected an integer >= 1, got `1.5`", ""),
        ("layout: {tp: true}", "layout.tp", "expected an integer >= 1, got `true`", ""),
        ("layout: {tp: }", "layout.tp", "expected an integer >= 1, got nothing", ""),
        ("layout: {tp: [1, 2]}", "layout.tp", "got a list of 2", ""),
        ("layout: {tp: {a: 1}}", "layout.tp", "got a mapping", ""),
        ("layout: {etp: 0}", "layout.etp", "expected an integer >= 1 or nothing, got `0`", ""),
        (
            "layout: {recompute: yes}",
            "layout.recompute",
            "expected `true` or `false` or `selective`, got `yes`",
            "",
        ),
        (
            "layout: {data_parallel: fsdp_2}",
            "layout.data_parallel",
            "expected one of `ddp`, `fsdp1`, `fsdp2`, got `fsdp_2`",
            "did you mean `fsdp2`?",
        ),
        (
            "layout: {stage_layers: [4, -1]}",
            "layout.stage_layers",
            "expected a list, each an integer >= 0 or nothing, got a list of 2",
            "",
        ),
        (
            "layout: {pipeline_schedule: Interleaved1F1B}",
            "layout.pipeline_schedule",
            "expected one of `gpipe`, `1f1b`, `interleaved_1f1b`, `interleaved_zero_bubble`, `zbv`, got",
            "did you mean `interleaved_1f1b`?",
        ),
        (
            "layout: {experts: megablock}",
            "layout.experts",
            "expected one of `loop`, `grouped_mm`, `megablocks`, got `megablock`",
            "did you mean `megablocks`?",
        ),
        (
            "layout: {parallelize: here}",
            "layout.parallelize",
            "expected `package.module:function` or nothing",
            "",
        ),
        ("layout: 3", "layout", "expected a mapping of fields, got `3`", "write `name: value` lines"),
        ("layout:", "layout", "expected a mapping of fields, got nothing", ""),
        ("layout: [tp]", "layout", "expected a mapping of fields, got a list of 1", ""),
        (
            "checks: {timeout: 0}",
            "checks.timeout",
            "expected a number > 0 and <= 1e+07, got `0`",
            "",
        ),
        (
            "checks: {timeout: .inf}",
            "checks.timeout",
            "expected a number > 0 and <= 1e+07, got `inf`",
            "",
        ),
        ("checks: {skip: routing}", "checks.skip", "expected a list, each text, got `routing`", ""),
        ("checks: {skip: [1]}", "checks.skip", "expected a list, each text, got a list of 1", ""),
        ("checks: {tolerance: exact}", "checks.tolerance", "expected a mapping of fields, got `exact`", ""),
        ("checks: {tolerance: {rtl: 1}}", "checks.tolerance.rtl", "unknown field", "did you mean `rtol`?"),
        ("name: 3", "name", "expected a name of at most 100 letters, digits, `-`, `_` and `.`, got `3`", ""),
        ("name: a b", "name", "got `a b`", ""),
        ("name: a+b", "name", "got `a+b`", ""),
        ("description: 3", "description", "expected text, got `3`", "put it in quotes"),
    ],
)
def test_wrong_field_beside_the_recipe(write, find_problems, *, section, path, message, remedy):
    file = write("case.yaml", f"# line 1\nrecipe: {{model: {{preset: stress}}}}\n\n{section}\n")
    problem = only(find_problems(file), path)
    assert (problem.file, problem.line) == (str(file), 4)
    assert message in problem.message
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("field", "path", "message", "remedy"),
    [
        ("tp: 2", "recipe.tp", "unknown field `tp`", "move it to `layout.tp`"),
        ("micro_batches: 2", "recipe.micro_batches", "unknown field", "move it to `layout.micro_batches`"),
        ("top_k: 2", "recipe.top_k", "unknown field", "move it to `recipe.model.moe.top_k`"),
        ("modle: {}", "recipe.modle", "unknown field `modle`", "did you mean `model`?"),
        ("sed: 1", "recipe.sed", "unknown field `sed`", "did you mean `seed`?"),
        ("seed: 1.5", "recipe.seed", "expected an integer, got `1.5`", ""),
        (
            "precision: fp32",
            "recipe.precision",
            "expected one of `float64`, `float32`, `bfloat16`, `mixed`",
            "",
        ),
        ("data: {min_valid: 2}", "recipe.data.min_valid", "expected a number from 0 to 1, got `2`", ""),
        (
            "optimizer: {betas: [0.9]}",
            "recipe.optimizer.betas",
            "expected a list of 2, each a number from 0",
            "",
        ),
        ("optimizer: {lr: .nan}", "recipe.optimizer.lr", "expected a number > 0, got `nan`", ""),
        ("optimizer: {clip_norm: no}", "recipe.optimizer.clip_norm", "a number > 0 or nothing", ""),
        ("name: 3", "recipe.name", "expected a name of at most 100 letters", ""),
    ],
)
def test_wrong_field_of_the_recipe(write, find_problems, *, field, path, message, remedy):
    text = f"recipe:\n  model: {{preset: stress}}\n  steps: 1\n  {field}\n"
    problem = only(find_problems(write("case.yaml", text)), path)
    assert problem.line == 4
    assert message in problem.message
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("model", "path", "message", "remedy"),
    [
        ("{preset: stres}", "recipe.model.preset", "unknown preset `stres`", "did you mean `stress`?"),
        ("{preset: 7}", "recipe.model.preset", "expected the name of a preset, got `7`", "choose from"),
        (
            "{preset: stress, moe: {tok_k: 1}}",
            "recipe.model.moe.tok_k",
            "unknown field",
            "did you mean `top_k`",
        ),
        ("{preset: stress, moe: 3}", "recipe.model.moe", "expected a mapping of fields, got `3`", ""),
        ("{preset: stress, moe: {hidden: 3}}", "recipe.model.moe.hidden", "unknown", "`recipe.model.hidden`"),
        (
            "{preset: gpt, moe: {top_k: 1}}",
            "recipe.model.moe",
            "missing fields `num_experts`, `expert_hid",
            "",
        ),
        ("{hidden: 3}", "recipe.model", "missing fields `vocab_size`, `num_layers`", "start from a preset"),
        ("3", "recipe.model", "expected a mapping of fields, got `3`", ""),
        ("{factory: here, vocab_size: 8}", "recipe.model.factory", "expected `package.module:function`", ""),
        (
            "{factory: 'a:b'}",
            "recipe.model",
            "missing field `vocab_size`",
            "write an integer >= 1",
        ),
        (
            "{factory: 'a:b', vocab_size: 8, hidden: 3}",
            "recipe.model.hidden",
            "unknown field `hidden`",
            "factory",
        ),
    ],
)
def test_wrong_model(write, find_problems, *, model, path, message, remedy):
    problem = only(find_problems(write("case.yaml", f"name: a\nrecipe:\n  model: {model}\n")), path)
    assert problem.line == 3
    assert message in problem.message
    assert remedy in problem.remedy


def test_wrong_field_beside_an_unknown_preset_is_not_lost(write, find_problems):
    text = "recipe:\n  model:\n    preset: nothing\n    hidden: x\n    moe: {top_k: 0}\n"
    problems = find_problems(write("case.yaml", text))
    assert [problem.path for problem in problems] == [
        "recipe.model.preset",
        "recipe.model.hidden",
        "recipe.model.moe.top_k",
    ]


def test_missing_recipe(write, find_problems):
    problem = only(find_problems(write("case.yaml", "layout: {tp: 2}\n")), "recipe")
    assert (problem.message, problem.line) == ("missing field `recipe`", 1)


def test_missing_model(write, find_problems):
    problem = only(find_problems(write("case.yaml", "name: a\nrecipe: {seed: 1}\n")), "recipe")
    assert (problem.message, problem.line) == ("missing field `model`", 2)
    assert problem.remedy == "write `model: {preset: stress}`"


def test_recipe_of_a_wrong_kind(write, find_problems):
    problem = only(find_problems(write("case.yaml", "recipe: [a]\n")), "recipe")
    assert "expected a recipe's name or a mapping, got a list of 1" in problem.message


def test_all_problems_of_all_files_at_once(write, find_problems, tmp_path):
    one = write(
        "one.yaml",
        """
        recipe:
          base: own
          tp: 2
          precision: float46
          model: {moe: {top_k: two}}
        layout:
          dp_shrad: 2
          tp: 3
          cp: 1
          cp: 2
        checks: {tolerance: {kind: fixed, rtol: 1.0}}
        """,
    )
    own = write("recipes/own.yaml", "model: {preset: stress}\nsteps: many\n")
    two = write("two.yaml", "recipe: ow\n")
    broken = write("broken.yaml", "a: [\n")
    problems = find_problems(one, two, broken, tmp_path / "none.yaml", overrides=["layout.x=1"], pattern="(")
    found = {(problem.file, problem.line, problem.path) for problem in problems}
    assert found >= {
        (str(one), 3, "recipe.tp"),
        (str(one), 4, "recipe.precision"),
        (str(one), 5, "recipe.model.moe.top_k"),
        (str(one), 7, "layout.dp_shrad"),
        (str(one), 8, "layout.tp"),
        (str(one), 10, "layout.cp"),
        (str(one), 11, "checks.tolerance.kind"),
        (str(own), 2, "recipe.steps"),
        (str(two), 1, "recipe"),
        (str(broken), 2, ""),
        (str(tmp_path / "none.yaml"), None, ""),
        ("--set", None, "layout.x"),
        ("", None, "-k"),
    }


def test_rules_do_not_judge_a_field_that_could_not_be_read(write, find_problems):
    text = "recipe: {model: {preset: stress}}\nlayout: {dp_shrad: 2, ep: 2}\n"
    assert [problem.path for problem in find_problems(write("case.yaml", text))] == ["layout.dp_shrad"]


def test_rules_still_judge_what_was_written_properly(write, find_problems):
    text = "recipe: {model: {preset: stress}, tp: 2}\nlayout: {tp: 3}\n"
    problems = find_problems(write("case.yaml", text))
    assert {problem.path for problem in problems} == {"recipe.tp", "layout.tp"}


def test_problems_are_in_the_order_of_the_lines(write, find_problems):
    text = "checks: {a: 1}\nlayout: {b: 1, tp: 0}\nrecipe: {model: {preset: x}, seed: y}\nzzz: 1\nname: 2\n"
    lines = [problem.line for problem in find_problems(write("case.yaml", text))]
    assert lines == [1, 2, 2, 3, 3, 4, 5]


def test_long_value_is_cut_short(write, find_problems):
    text = "recipe: {{model: {{preset: stress}}}}\nlayout: {{tp: {}}}\n"
    [problem] = find_problems(write("case.yaml", text.format("x" * 60)))
    assert problem.message.endswith(f"got `{'x' * 60}`")
    [problem] = find_problems(write("case.yaml", text.format("x" * 61)))
    assert problem.message.endswith(f"got `{'x' * 60}...`")


def test_long_list_of_names_is_cut_short():
    names = [f"n{index}" for index in range(MAX_LISTED)]
    assert enumerate_names(names).endswith(f"`n{MAX_LISTED - 1}`")
    assert enumerate_names([*names, "a", "b"]).endswith(f"`n{MAX_LISTED - 1}`, and 2 more")


def test_field_of_several_sections_is_moved_to_any_of_them(write, find_problems):
    text = "recipe: {model: {preset: stress}}\nlayout: {name: x}\n"
    problem = only(find_problems(write("case.yaml", text)), "layout.name")
    assert problem.remedy == "move it to `name` or `recipe.name` or `recipe.optimizer.name`"
