"""A check that a case skips or declares to differ must be one."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.results.checks import CHECKS, OWN_CHECKS
from moeverify.validation.checks import CHECK_NAMES

CASE = "recipe: {name: a, model: {preset: tiny-gpt}}\nlayout: {dp_shard: 2}\nchecks: {%s}\n"


def test_the_names_are_those_of_the_checks() -> None:
    assert set(CHECK_NAMES) == {check.name for check in CHECKS} | set(OWN_CHECKS)


@pytest.mark.parametrize(
    ("checks", "path", "message", "remedy"),
    [
        ("skip: [gradients]", "checks.skip", "there is no check `gradients`", "did you mean `gradient`?"),
        ("skip: [gradient_norm]", "checks.skip", "`gradient_norm`", "did you mean `gradient norm`?"),
        (
            "differs: [lose], because: why",
            "checks.differs",
            "there is no check `lose`",
            "did you mean `loss`?",
        ),
        ("skip: [xyz]", "checks.skip", "there is no check `xyz`", "choose from `initial state`, `routing`"),
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
    names = ", ".join(f"'{name}'" for name in CHECK_NAMES)
    assert find_problems(write("a.yaml", CASE % f"skip: [{names}]")) == []
