"""Cases, recipe files and their bases: their meaning, their names, and their selection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import Case, CustomModel, Layout, ReferenceModel
from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError

OWN = """
model: {preset: stress}
data: {batch: 4, min_valid: 0.5}
optimizer:
  name: adamw
  lr: 1e-2
  betas: [0.9, 0.99]
seed: 7
"""


def load_one(path: Path, **options) -> Case:
    [case] = load_cases([path], **options)
    return case


def test_every_field_is_read(write):
    file = write(
        "some.yaml",
        """
        name: fsdp2-ep2
        description: two ranks
        recipe:
          name: mine
          model: {preset: stress, hidden: 64, moe: {top_k: 2}}
          data: {batch: 4, seq_len: 8, min_valid: 0.5}
          optimizer: {name: sgd, lr: 1e-2, momentum: 0.9, weight_decay: 0.1, clip_norm: 1}
          precision: float32
          steps: 4
          seed: -3
        layout: {dp_shard: 2, ep: 2, experts: grouped_mm, recompute: true}
        checks: {tolerance: {kind: fixed, rtol: 1e-3, atol: 0}, steps: forced, repeat: never, skip: [routing]}
        """,
    )
    case = load_one(file)
    assert (case.name, case.description, case.file) == ("fsdp2-ep2", "two ranks", str(file))
    assert case.layout == Layout(dp_shard=2, ep=2, experts="grouped_mm", recompute=True)
    assert (case.checks.tolerance.rtol, case.checks.tolerance.atol) == (1e-3, 0.0)
    assert (case.checks.steps, case.checks.repeat, case.checks.skip) == ("forced", "never", ("routing",))
    recipe = case.recipe
    assert (recipe.name, recipe.precision, recipe.steps, recipe.seed) == ("mine", "float32", 4, -3)
    assert (recipe.optimizer.name, recipe.optimizer.momentum, recipe.optimizer.clip_norm) == ("sgd", 0.9, 1.0)
    assert (recipe.data.batch, recipe.data.seq_len, recipe.data.min_valid) == (4, 8, 0.5)
    expected = dict(PRESETS["stress"], preset="stress", hidden=64)
    expected["moe"] = dict(PRESETS["stress"]["moe"], top_k=2)
    assert isinstance(recipe.model, ReferenceModel)
    assert recipe.model == ReferenceModel.model_validate_json(json.dumps(expected))


def test_name_is_the_stem_by_default(write):
    case = load_one(write("fsdp-2.1_x.yaml", "recipe: {model: {preset: stress}}\n"))
    assert (case.name, case.description, case.layout) == ("fsdp-2.1_x", "", Layout())


def test_stem_that_is_no_name(write, find_problems):
    file = write("a b.yaml", "recipe: {model: {preset: stress}}\n")
    [problem] = find_problems(file)
    assert (problem.file, problem.remedy) == (str(file), "rename the file, or write `name:`")
    file.write_text("name: ab\nrecipe: {model: {preset: stress}}\n")
    assert find_problems(file) == []


def test_recipe_by_name_is_the_file_beside(write):
    write("recipes/own.yaml", OWN)
    recipe = load_one(write("case.yaml", "recipe: own\n")).recipe
    assert (recipe.name, recipe.seed, recipe.data.batch, recipe.optimizer.betas) == ("own", 7, 4, (0.9, 0.99))


def test_inline_recipe_has_the_name_of_its_case(write):
    text = "name: some\nrecipe: {model: {preset: stress}}\n"
    assert load_one(write("case.yaml", text)).recipe.name == "some"


def test_model_with_all_its_fields(write):
    fields = (
        "vocab_size: 8, hidden: 8, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 4, ffn_hidden: 8"
    )
    model = load_one(write("case.yaml", f"recipe: {{model: {{{fields}}}}}\n")).recipe.model
    assert isinstance(model, ReferenceModel)
    assert (model.preset, model.ffn_hidden, model.moe) == (None, 8, None)


def test_null_removes_the_experts(write):
    model = load_one(write("case.yaml", "recipe: {model: {preset: stress, moe: null}}\n")).recipe.model
    assert isinstance(model, ReferenceModel)
    assert model.moe is None


def test_factory_makes_the_model_foreign(write):
    text = "recipe: {model: {factory: 'a.b:c', vocab_size: 8, arguments: {x: [1, {y: null}]}, loss: 'a:d'}}\n"
    model = load_one(write("case.yaml", text)).recipe.model
    arguments = {"x": [1, {"y": None}]}
    assert model == CustomModel(factory="a.b:c", vocab_size=8, arguments=arguments, loss="a:d")


def test_base_with_changes_is_merged_deeply(write):
    write("recipes/own.yaml", OWN)
    text = "recipe: {base: own, seed: 3, model: {moe: {top_k: 1}}, optimizer: {lr: 0.5}}\n"
    recipe = load_one(write("case.yaml", text)).recipe
    assert isinstance(recipe.model, ReferenceModel)
    assert recipe.model.moe is not None
    assert (recipe.seed, recipe.model.moe.top_k, recipe.model.moe.num_experts) == (3, 1, 16)
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.data.batch) == (0.5, (0.9, 0.99), 4)
    assert recipe.name == f"own+{recipe.fingerprint()[:8]}"


@pytest.mark.parametrize("model", ["{preset: tiny-gpt}", "{factory: 'a:b', vocab_size: 8}"])
def test_a_change_of_preset_or_factory_starts_the_model_afresh(write, model):
    write("recipes/own.yaml", "model: {preset: stress, hidden: 64}\n")
    changed = load_one(write("case.yaml", f"recipe: {{base: own, model: {model}}}\n")).recipe.model
    alone = load_one(write("alone.yaml", f"recipe: {{model: {model}}}\n")).recipe.model
    assert changed == alone


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("{base: own}", "own"),
        ("{base: own, seed: 7}", "own"),
        ("{base: own, seed: 8, name: other}", "other"),
        ("{base: own, name: other}", "other"),
    ],
)
def test_name_of_a_base(write, recipe, name):
    write("recipes/own.yaml", OWN)
    assert load_one(write("case.yaml", f"recipe: {recipe}\n")).recipe.name == name


def test_recipe_file_on_a_base_has_its_own_name(write):
    write("recipes/own.yaml", OWN)
    write("recipes/more.yaml", "base: own\nseed: 9\n")
    write("recipes/most.yaml", "base: more\nsteps: 5\n")
    recipe = load_one(write("case.yaml", "recipe: most\n")).recipe
    assert (recipe.name, recipe.seed, recipe.steps, recipe.data.batch) == ("most", 9, 5, 4)


def test_circle_of_bases(write, find_problems):
    write("recipes/a.yaml", "steps: 1\nbase: b\n")
    b = write("recipes/b.yaml", "base: a\n")
    [problem] = find_problems(write("case.yaml", "recipe: a\n"))
    assert (problem.file, problem.line, problem.path) == (str(b), 1, "recipe.base")
    assert problem.message == "recipes stand on each other in a circle: a -> b -> a"


@pytest.mark.parametrize(
    ("recipe", "path", "remedy"),
    [
        ("ow", "recipe", "did you mean `own`?"),
        ("qqq", "recipe", "choose from `own`"),
        ("own.yaml", "recipe", "write `own`"),
        ("../recipes/own", "recipe", "write `own`"),
        ("{base: ow, seed: 1}", "recipe.base", "did you mean `own`?"),
        ("{base: [own]}", "recipe.base", "choose from `own`"),
    ],
)
def test_recipe_that_is_not_there(write, find_problems, *, recipe, path, remedy):
    write("recipes/own.yaml", OWN)
    file = write("case.yaml", f"name: a\nrecipe: {recipe}\n")
    [problem] = find_problems(file)
    assert (problem.file, problem.line, problem.path, problem.remedy) == (str(file), 2, path, remedy)


def test_no_recipes_at_all(write, find_problems, tmp_path):
    [problem] = find_problems(write("case.yaml", "recipe: own\n"))
    assert problem.message == f"there is no recipe `own` in {tmp_path / 'recipes'}"
    assert str(tmp_path / "recipes" / "NAME.yaml") in problem.remedy


def test_a_base_that_is_not_there_hides_no_other_problem(write, find_problems):
    problems = find_problems(write("case.yaml", "recipe:\n  base: ow\n  steps: x\n  model: {hiden: 1}\n"))
    assert [(problem.line, problem.path) for problem in problems] == [
        (2, "recipe.base"),
        (3, "recipe.steps"),
        (4, "recipe.model.hiden"),
    ]


def test_name_in_a_recipe_file(write, find_problems):
    own = write("recipes/own.yaml", "model: {preset: stress}\nname: other\n")
    [problem] = find_problems(write("case.yaml", "recipe: own\n"))
    assert (problem.file, problem.line, problem.path) == (str(own), 2, "recipe.name")
    assert "it is called `own` after its file" in problem.remedy


def test_problem_of_a_shared_recipe_is_reported_once(write, find_problems):
    own = write("recipes/own.yaml", "model: {preset: stress}\nseed: x\n")
    problems = find_problems(write("a.yaml", "recipe: own\n"), write("b.yaml", "recipe: own\n"))
    assert [(problem.file, problem.line) for problem in problems] == [(str(own), 2)]


def test_broken_recipe_file(write, find_problems):
    own = write("recipes/own.yaml", "model: {preset: stress\n")
    [problem] = find_problems(write("case.yaml", "recipe: own\n"))
    assert (problem.file, problem.line) == (str(own), 2)


def test_folder_means_its_yaml_files_in_order(write, tmp_path):
    for name in ("b.yaml", "a.yaml", "sub/c.yaml", "d.yml", "recipes/own.yaml"):
        write(name, "recipe: {model: {preset: stress}}\n" if "own" not in name else OWN)
    assert [case.name for case in load_cases([tmp_path])] == ["a", "b"]


def test_a_file_given_twice_is_one_case(write, tmp_path):
    file = write("a.yaml", "recipe: {model: {preset: stress}}\n")
    assert len(load_cases([file, tmp_path, tmp_path / "sub" / ".." / "a.yaml"])) == 1


def test_same_name_in_two_files(write, find_problems):
    first = write("a.yaml", "name: x\nrecipe: {model: {preset: stress}}\n")
    second = write("b.yaml", "description: b\nname: x\nrecipe: {name: y, model: {preset: stress}}\n")
    [problem] = find_problems(first, second)
    assert (problem.file, problem.line, problem.path) == (str(second), 2, "name")
    assert problem.message == f"the name `x` is also that of {first}"


def test_same_stem_in_two_folders(write, find_problems):
    first = write("one/a.yaml", "recipe: {model: {preset: stress}}\n")
    second = write("two/a.yaml", "recipe: {model: {preset: stress}}\n")
    [problem] = find_problems(first, second)
    assert (problem.file, problem.line) == (str(second), None)
    assert str(first) in problem.message


def test_different_recipes_of_one_name(write, find_problems):
    first = write("a.yaml", "recipe: {name: r, model: {preset: stress}}\n")
    second = write("b.yaml", "name: b\nrecipe: {name: r, seed: 1, model: {preset: stress}}\n")
    [problem] = find_problems(first, second)
    assert (problem.file, problem.line, problem.path) == (str(second), 2, "recipe")
    assert problem.message == f"this recipe is called `r` like the different one of {first}"
    second.write_text("recipe: {name: r, seed: 0, model: {preset: stress}}\n")
    assert find_problems(first, second) == []


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (None, ["fsdp2", "fsdp2-cp2", "hsdp.tp2"]),
        ("fsdp2", ["fsdp2", "fsdp2-cp2"]),
        ("FSDP", ["fsdp2", "fsdp2-cp2"]),
        ("fsdp2 and not cp", ["fsdp2"]),
        ("not fsdp2", ["hsdp.tp2"]),
        ("cp2 or tp2", ["fsdp2-cp2", "hsdp.tp2"]),
        ("not (cp2 or tp2)", ["fsdp2"]),
        ("tp or fsdp and cp", ["fsdp2-cp2", "hsdp.tp2"]),
        ("not not sdp.tp", ["hsdp.tp2"]),
    ],
)
def test_pattern_chooses_by_name(write, tmp_path, pattern, names):
    for name in ("fsdp2", "fsdp2-cp2", "hsdp.tp2"):
        write(f"{name}.yaml", "recipe: {model: {preset: stress}}\n")
    assert [case.name for case in load_cases([tmp_path], pattern=pattern)] == names


def test_pattern_without_a_match_lists_the_names(write, find_problems, tmp_path):
    for name in ("a1", "b2"):
        write(f"{name}.yaml", "recipe: {model: {preset: stress}}\n")
    [problem] = find_problems(tmp_path, pattern="c")
    assert str(problem) == "-k: no case matches `c`; the cases are `a1`, `b2`"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "the pattern is empty"),
        ("a and", "expected a word, got the end"),
        ("or a", "expected a word, got `or`"),
        ("a b", "expected `and`, `or` or the end, got `b`"),
        ("(a", "a `(` is not closed"),
        ("a)", "expected `and`, `or` or the end, got `)`"),
        ("()", "expected a word, got `)`"),
        ("not", "expected a word, got the end"),
    ],
)
def test_pattern_that_is_no_expression(write, find_problems, pattern, message):
    [problem] = find_problems(write("a.yaml", "recipe: {model: {preset: stress}}\n"), pattern=pattern)
    assert problem.path == "-k"
    assert message in problem.message


def test_a_case_that_is_not_chosen_must_be_valid_too(write, find_problems):
    good = write("good.yaml", "recipe: {model: {preset: stress}}\n")
    bad = write("bad.yaml", "recipe: {model: {preset: stress}}\nlayout: {tp: x}\n")
    assert [problem.file for problem in find_problems(good, bad, pattern="good")] == [str(bad)]


def test_error_text_holds_one_problem_a_line(write):
    file = write("a.yaml", "recipe: {model: {preset: stress}}\nlayout: {tp: x, cp: 3}\n")
    with pytest.raises(CaseError) as caught:
        load_cases([file])
    assert str(caught.value).splitlines() == [
        f"{file}:2: layout.tp: expected an integer >= 1, got `x`",
        f"{file}:2: layout.cp: recipe.data.seq_len 16 is not divisible by 6 (2 x cp, for the zigzag split); "
        "set recipe.data.seq_len to a multiple of 6, such as 18",
    ]


def test_loading_imports_no_torch(write):
    file = write("a.yaml", "recipe: {model: {preset: stress}}\n")
    code = (
        "import sys, pathlib; import moeverify.report.case_list\n"
        "from moeverify.cases.validation.load import load_cases;"
        "load_cases([pathlib.Path(sys.argv[1])]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == 0
