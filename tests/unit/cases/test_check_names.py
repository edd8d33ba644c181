"""Names of checks that a case skips or declares to differ must exist."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.cases.validation.load import load_cases
from moeverify.results.checks import CheckName

CASE = "recipe: {name: a, model: {preset: tiny-gpt}}\nlayout: {dp_shard: 2}\nchecks: {%s}\n"


@pytest.mark.parametrize(
    ("checks", "path", "message", "remedy"),
    [
        ("skip: [gradients]", "checks.skip", "there is no check `gradients`", "did you mean `gradient`?"),
        ("skip: [gradient_nrm]", "checks.skip", "`gradient_nrm`", "did you mean `gradient norm`?"),
        (
            "differs: [lose], because: why",
            "checks.differs",
            "there is no check `lose`",
            "did you mean `loss`?",
        ),
        ("skip: [xyz]", "checks.skip", "there is no check `xyz`", "choose from `loaded`, `initial state`"),
        ("also: [xyz]", "checks.also", "there is no check `xyz`", "choose from `loaded`, `initial state`"),
        ("also: [gradient]", "checks.also", "`gradient` is checked in any case", "remove it"),
    ],
)
def test_an_unknown_check_is_told_with_the_nearest(
    write: Any, find_problems: Any, checks: str, path: str, message: str, remedy: str
) -> None:
    [problem] = find_problems(write("a.yaml", CASE % checks))
    assert problem.path == path
    assert problem.line == 3
    assert message in problem.message
    assert remedy in problem.remedy


def test_known_checks_may_be_skipped(write: Any, find_problems: Any) -> None:
    names = ", ".join(f"'{name}'" for name in CheckName)
    assert find_problems(write("a.yaml", CASE % f"skip: [{names}]")) == []


def test_underscores_stand_for_spaces(write: Any) -> None:
    [case] = load_cases(
        [write("a.yaml", CASE % "skip: [initial_state, gradient_norm], differs: [loss], because: x")]
    )
    assert case.checks.skip == (CheckName.INITIAL_STATE, CheckName.GRADIENT_NORM)
    assert case.checks.differs == (CheckName.LOSS,)


@pytest.mark.parametrize(
    ("recipe", "layout", "field"),
    [
        ("{name: a, model: {factory: 'own:make', vocab_size: 8}}", "{dp_shard: 2}", "recipe.model.factory"),
        ("{name: a, model: {preset: tiny-gpt}, step: 'own:step'}", "{dp_shard: 2}", "recipe.step"),
        (
            "{name: a, model: {preset: tiny-gpt}}",
            "{dp_shard: 2, parallelize: 'own:divide'}",
            "layout.parallelize",
        ),
    ],
)
@pytest.mark.parametrize("check", ["forced_blocks", "gradient_sum"])
def test_layers_are_known_in_the_reference_model_under_our_layouts_alone(
    write: Any, find_problems: Any, check: str, recipe: str, layout: str, field: str
) -> None:
    text = f"recipe: {recipe}\nlayout: {layout}\nchecks: {{also: [{check}]}}\n"
    problems = [each for each in find_problems(write("a.yaml", text)) if each.path == "checks.also"]
    assert [field in each.remedy for each in problems] == [True]
    model = "recipe: {name: a, model: {preset: tiny-gpt}}\nlayout: {dp_shard: 2}\n"
    usual = f"{model}checks: {{also: [{check}]}}\n"
    assert find_problems(write("b.yaml", usual)) == []


def test_sums_of_gradients_are_asked_for_where_they_are_not_made_by_themselves(
    write: Any, find_problems: Any
) -> None:
    model = "model: {preset: stress}, float8: rowwise, precision: mixed"
    text = f"recipe: {{name: a, {model}}}\nlayout: {{dp_shard: 2}}\nchecks: {{also: [gradient_sum]}}\n"
    (problem,) = find_problems(write("a.yaml", text))
    assert (problem.path, problem.message) == ("checks.also", "`gradient sum` is checked in any case")
