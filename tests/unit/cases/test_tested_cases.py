"""The cases that `make test` runs use every recipe and every choice of a layout that some case uses."""

from __future__ import annotations

import re
from pathlib import Path

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases

ROOT = Path(__file__).parents[3]
CASES = {case.name: case for case in load_cases(sorted((ROOT / "cases").glob("*.yaml")))}


def list_tested() -> list[str]:
    found = re.search(r"^TESTED := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].replace("\\\n", " ").split()


def list_choices(case: Case) -> set[tuple[str, str]]:
    """Return the recipe, and the fields of layout and checks that differ from their defaults.

    Of a number only that it is above 1, and of a list or section only that it is there.
    """
    found = {("recipe", case.recipe.name), ("data_parallel", case.layout.data_parallel)}
    for section in (case.layout, case.checks):
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if value != field.get_default(call_default_factory=True) and name not in ("timeout", "because"):
                found.add((name, str(value) if isinstance(value, bool | str) else ""))
    return found


def test_every_recipe_and_choice_is_tested() -> None:
    tested = list_tested()
    assert len(tested) < len(CASES) / 2, "`make verify` runs all of them"
    wanted = set().union(*map(list_choices, CASES.values()))
    assert wanted - set().union(*(list_choices(CASES[name]) for name in tested)) == set()


def test_every_layout_of_eight_ranks_is_tested() -> None:
    assert {name for name, case in CASES.items() if case.layout.world_size == 8} <= set(list_tested())


def test_every_golden_has_a_case() -> None:
    recorded = {path.name.partition(".")[0] for path in (ROOT / "golden").glob("*.json")}
    others = load_cases(sorted((ROOT / "examples" / "reshard").glob("*.yaml")))
    assert recorded == {case.recipe.name for case in (*CASES.values(), *others)}
