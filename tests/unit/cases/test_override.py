"""`--set`: its changes, its refusals, and the resulting name of the recipe."""

from __future__ import annotations

import pytest

from moeverify.cases.schema import CustomModel, ReferenceModel
from moeverify.cases.validation.load import load_cases

OWN = "model: {preset: stress}\nseed: 7\n"
INLINE = "recipe: {model: {preset: stress}, seed: 7}\nlayout: {dp_shard: 2, ep: 2}\n"


@pytest.fixture
def load(write):
    def do(text, *overrides, **options):
        write("recipes/own.yaml", OWN)
        [case] = load_cases([write("case.yaml", text)], overrides=overrides, **options)
        return case

    return do


def test_layout_and_checks_are_replaced(load):
    case = load(
        INLINE, "layout.tp=2", " layout.dp_shard = 4", "checks.timeout=10", "checks.tolerance.kind=exact"
    )
    assert (case.layout.tp, case.layout.dp_shard, case.layout.ep) == (2, 4, 2)
    assert (case.checks.timeout, case.checks.tolerance.kind) == (10.0, "exact")
    assert case.recipe.name == "case"


def test_the_last_one_wins(load):
    assert load(INLINE, "recipe.seed=1", "recipe.seed=2").recipe.seed == 2


@pytest.mark.parametrize("recipe", ["own", "{base: own}", "{base: own, name: own}"])
def test_recipe_field_of_a_named_recipe(load, recipe):
    case = load(
        f"recipe: {recipe}\n", "recipe.seed=3", "recipe.model.moe.top_k=1", "recipe.optimizer.lr=1e-2"
    )
    assert isinstance(case.recipe.model, ReferenceModel)
    assert case.recipe.model.moe is not None
    assert (case.recipe.seed, case.recipe.model.moe.top_k, case.recipe.optimizer.lr) == (3, 1, 1e-2)
    assert case.recipe.name == f"own+{case.recipe.fingerprint()[:8]}"


def test_recipe_field_of_an_inline_recipe(load):
    recipe = load(INLINE, "recipe.seed=3").recipe
    assert recipe.name == f"case+{recipe.fingerprint()[:8]}"


def test_recipe_field_of_an_inline_recipe_with_a_name(load):
    recipe = load("recipe: {name: mine, model: {preset: stress}}\n", "recipe.seed=3").recipe
    assert recipe.name == f"mine+{recipe.fingerprint()[:8]}"


def test_recipe_field_of_a_named_base(load):
    recipe = load("recipe: {base: own, name: mine, steps: 3}\n", "recipe.seed=3").recipe
    assert (recipe.steps, recipe.name) == (3, f"mine+{recipe.fingerprint()[:8]}")


@pytest.mark.parametrize("text", ["recipe: own\n", INLINE, "recipe: {base: own, name: mine, steps: 3}\n"])
def test_a_change_to_the_same_value_keeps_the_name(load, text):
    assert load(text, "recipe.seed=7").recipe == load(text).recipe


def test_name_that_is_given_with_the_change(load):
    recipe = load("recipe: {base: own, steps: 3}\n", "recipe.name=mine", "recipe.seed=3").recipe
    assert (recipe.name, recipe.seed, recipe.steps) == ("mine", 3, 3)


def test_another_recipe(load, write):
    write("recipes/other.yaml", "model: {preset: tiny-gpt}\n")
    recipe = load("recipe: {base: own, seed: 3}\n", "recipe=other").recipe
    assert (recipe.name, recipe.seed) == ("other", 0)


def test_another_preset_starts_the_model_afresh(load):
    model = load(
        "recipe: {model: {preset: stress, hidden: 64}}\n",
        "recipe.model.preset=tiny-gpt",
        "recipe.model.num_layers=1",
    ).recipe.model
    assert isinstance(model, ReferenceModel)
    assert (model.preset, model.hidden, model.num_layers) == ("tiny-gpt", 32, 1)


def test_null_removes_the_experts(load):
    model = load("recipe: own\n", "recipe.model.moe=null").recipe.model
    assert isinstance(model, ReferenceModel)
    assert model.moe is None


def test_mapping_and_list(load):
    case = load(
        INLINE, "recipe.data={batch: 4}", "recipe.optimizer.betas=[0.8, 0.9]", "checks.skip=[loss, repeat]"
    )
    assert (case.recipe.data.batch, case.recipe.data.seq_len) == (4, 16)
    assert (case.recipe.optimizer.betas, case.checks.skip) == ((0.8, 0.9), ("loss", "repeat"))


def test_arguments_of_a_foreign_model(load):
    text = "recipe: {model: {factory: 'a:b', vocab_size: 8, arguments: {x: 1}}}\n"
    model = load(text, "recipe.model.arguments.y=2").recipe.model
    assert isinstance(model, CustomModel)
    assert model.arguments == {"x": 1, "y": 2}


def test_only_chosen_cases_are_changed(write, find_problems):
    paths = [write(f"{name}.yaml", "recipe: {model: {preset: stress}}\n") for name in ("a", "b")]
    [case] = load_cases(paths, overrides=["layout.tp=2"], pattern="b")
    assert (case.name, case.layout.tp) == ("b", 2)


@pytest.mark.parametrize(
    ("override", "path", "message", "remedy"),
    [
        ("layout.tpp=2", "layout.tpp", "there is no such field", "did you mean `layout.tp`?"),
        ("layot.tp=2", "layot.tp", "there is no such field", "did you mean `layout.tp`?"),
        ("seed=2", "seed", "there is no such field", "did you mean `recipe.seed`?"),
        (
            "layout.precision=x",
            "layout.precision",
            "there is no such field",
            "did you mean `recipe.precision`?",
        ),
        ("recipe.model.moe.topk=1", "recipe.model.moe.topk", "no such field", "`recipe.model.moe.top_k`?"),
        ("layout.qqq=2", "layout.qqq", "there is no such field", "`dp_replicate`, `dp_shard`, `cp`"),
        ("checks.tolerance.rtl.x=2", "checks.tolerance.rtl.x", "no such field", "did you mean"),
        ("file=x", "file", "there is no such field", "choose from `name`"),
        ("layout.tp", "", "expected `path=value`, got `layout.tp`", "write for example `layout.tp=2`"),
        ("=2", "", "expected `path=value`, got `=2`", ""),
        ("layout.tp=[", "layout.tp", "the text ends too early", ""),
        ("layout.tp=two", "layout.tp", "expected an integer >= 1, got `two`", ""),
        ("layout.tp=", "layout.tp", "expected an integer >= 1, got nothing", ""),
        (
            "layout.tp=3",
            "layout.tp",
            "recipe.model.num_heads 8 (attention heads) is not divisible",
            "such as 9",
        ),
        ("layout={tpp: 3}", "layout.tpp", "unknown field `tpp`", "did you mean `tp`?"),
        (
            "recipe.model.preset=stres",
            "recipe.model.preset",
            "unknown preset `stres`",
            "did you mean `stress`?",
        ),
        ("recipe=onw", "recipe", "there is no recipe `onw`", "did you mean `own`?"),
        ("recipe.base=onw", "recipe.base", "there is no recipe `onw`", "did you mean `own`?"),
        ("recipe.model.factory=a", "recipe.model.factory", "expected `package.module:function`", ""),
    ],
)
def test_override_that_is_refused(write, find_problems, *, override, path, message, remedy):
    write("recipes/own.yaml", OWN)
    problems = find_problems(write("case.yaml", "recipe: own\n"), overrides=[override])
    found = [problem for problem in problems if problem.path == path and message in problem.message]
    assert len(found) == 1, problems
    assert (found[0].file, found[0].line) == ("--set", None)
    assert remedy in found[0].remedy


def test_wrong_override_is_reported_once_for_all_cases(write, find_problems):
    paths = [write(f"{name}.yaml", "recipe: {model: {preset: stress}}\n") for name in ("a", "b")]
    assert len(find_problems(*paths, overrides=["layout.tp=x"])) == 1
