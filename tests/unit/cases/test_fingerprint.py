"""A recipe's fingerprint: only fields that affect the result change it, and all of them do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import CustomModel, Recipe, ReferenceModel

MLA = {"kv_lora": 8, "qk_nope": 4, "qk_rope": 4, "v_head": 4}
YARN = {"factor": 4.0, "original_length": 8}


def recipe(**model: Any) -> Recipe:
    fields = {**PRESETS["stress"], "preset": "stress", "mla": MLA, "yarn": YARN, **model}
    return Recipe(name="some", model=ReferenceModel.model_validate_json(json.dumps(fields)))


def foreign() -> Recipe:
    model = CustomModel(factory="a:b", arguments={"x": 1}, loss="a:c", vocab_size=8)
    return Recipe(name="some", model=model)


def walk(section: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field that is not a section."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from walk(value, (*path, name))
        else:
            yield (*path, name)


def change(section: BaseModel, path: tuple[str, ...]) -> BaseModel:
    """Return `section` with another value in the field at `path`, sensible or not."""
    name, *rest = path
    value = getattr(section, name)
    choices = get_args(type(section).model_fields[name].annotation)
    return section.model_copy(update={name: change(value, tuple(rest)) if rest else other(value, choices)})


def other(value: Any, choices: tuple[Any, ...] = ()) -> Any:
    if value in choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, int | float):
        return not value if isinstance(value, bool) else value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value[:-1], other(value[-1]))
    if isinstance(value, dict):
        return {**value, "y": 2}
    is_text = value is None and (str in choices or any(str in get_args(choice) for choice in choices))
    is_number = value is None and any(int in (choice, *get_args(choice)) for choice in choices)
    return "module:function" if is_text else 1 if is_number else 1.0


@pytest.mark.parametrize("start", [recipe(), foreign()], ids=["reference", "foreign"])
def test_every_field_but_the_names_changes_the_fingerprint(start):
    unchanged = []
    for path in walk(start):
        changed = change(start, path)
        assert changed != start
        assert isinstance(changed, Recipe)
        if changed.fingerprint() == start.fingerprint():
            unchanged.append(".".join(path))
    is_foreign = isinstance(start.model, CustomModel)
    assert unchanged == (["name"] if is_foreign else ["name", "model.preset"])


def test_all_fields_of_the_stress_are_walked():
    paths = {".".join(path) for path in walk(recipe())}
    assert {"model.moe.top_k", "model.tie_embedding", "data.min_valid", "optimizer.betas", "seed"} <= paths
    assert len(paths) > 45


def test_each_single_change_has_its_own_fingerprint():
    start = recipe()
    paths = [path for path in walk(start) if path not in {("name",), ("model", "preset")}]
    prints = {change(start, path).fingerprint() for path in paths}  # type: ignore[attr-defined]
    assert len(prints) == len(paths)


def test_fingerprint_is_the_same_on_every_machine():
    # Recorded goldens are found by this number: changing it invalidates all of them.
    assert foreign().fingerprint() == "f4b4c47c4f69eccc"


def test_a_preset_and_its_fields_are_the_same_recipe():
    assert recipe().fingerprint() == recipe(preset=None).fingerprint()


class LaterRecipe(Recipe):
    later_field: int = 1


def test_a_field_that_is_added_later_changes_no_recipe_that_lacks_it():
    later = LaterRecipe(**{name: getattr(foreign(), name) for name in Recipe.model_fields})
    assert later.fingerprint() == foreign().fingerprint()
    assert later.model_copy(update={"later_field": 2}).fingerprint() != foreign().fingerprint()
