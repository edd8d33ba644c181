"""Resolution of the recipe of a case: base, changes, preset and name.

The name of a recipe is the key of its golden. A recipe that is changed on the way gets another name, unless
the change has no effect. A file of `recipes/` has one recipe, optionally based on another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeverify.cases.document import Report, read_document
from moeverify.cases.entry import Entry, FileLine, build_entry, merge, show
from moeverify.cases.override import FILE
from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import Recipe
from moeverify.cases.section import ProblemLog, build_section
from moeverify.cases.suggest import suggest
from moeverify.errors import Problem


def merge_recipe(base: Entry, change: Entry) -> Entry:
    """Return `base` updated by `change`. A preset or factory in `change` replaces the whole model."""
    model = change.fields.get("model")
    if model is not None and not {"preset", "factory"}.isdisjoint(model.fields):
        base = base.without("model")
    return merge(base, change)


def read_recipe(
    named: Entry, folder: Path, path: str, report: Report, trail: tuple[str, ...]
) -> Entry | None:
    """Return the fields of the recipe file that `named` names, merged over the fields of its base.

    `trail` holds the names of the recipes that led here, to detect cycles. Return None after reporting a
    problem.
    """
    place, name = named.place, named.content

    def reject(message: str, remedy: str) -> None:
        report(Problem(message, place.file, place.line, path, remedy))

    stems = sorted(item.stem for item in folder.glob("*.yaml")) if folder.is_dir() else []
    if not isinstance(name, str):
        reject(f"expected the name of a recipe, got {show(named)}", suggest("", stems))
        return None
    if name in trail:
        reject(
            f"recipes stand on each other in a circle: {' -> '.join((*trail, name))}", "remove one `base:`"
        )
        return None
    if name not in stems:
        reject(f"there is no recipe `{name}` in {folder}", _find_remedy(name, stems, folder))
        return None
    entry = read_document(folder / f"{name}.yaml", report)
    if entry is None:
        return None
    if "name" in entry.fields:
        at = entry.fields["name"].place
        remedy = f"it is called `{name}` after its file: remove the line or rename the file"
        report(Problem("a recipe file has no field `name`", at.file, at.line, "recipe.name", remedy))
    own = entry.without("name", "base")
    if "base" not in entry.fields:
        return own
    base = read_recipe(entry.fields["base"], folder, "recipe.base", report, (*trail, name))
    return merge_recipe(base, own) if base is not None else None


def _find_remedy(name: str, stems: list[str], folder: Path) -> str:
    stem = name.rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    if stem in stems:
        return f"write `{stem}`"
    if stems:
        return suggest(stem, stems)
    return f"write it as {folder / 'NAME.yaml'}, or write its fields here"


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # part of the file name of a golden
NAME_WORDS = "at most 100 letters, digits, `-`, `_` and `.`"


@dataclass(frozen=True)
class WrittenRecipe:
    """A recipe as written: its fields, its name, and the original fields that belong to this name.

    `folder` is the folder of the case file.
    """

    entry: Entry
    label: str
    original: Entry
    folder: Path


def resolve_recipe(
    written: Entry, before: Entry | None, case_name: str, folder: Path, problem_log: ProblemLog
) -> WrittenRecipe:
    """Return the recipe of a case from its field `recipe`. `before` is the field without overrides.

    `folder` is the folder of the case file, and recipe files are in its `recipes/`.
    """
    beside, folder = folder, folder / "recipes"
    if isinstance(written.content, str):
        entry = _read_base(written, folder, "recipe", problem_log)
        return WrittenRecipe(entry, written.content, entry, beside)
    if not written.is_mapping:
        remedy = "name a file of `recipes/`, or write the fields"
        problem_log.reject(
            written, "recipe", f"expected a recipe's name or a mapping, got {show(written)}", remedy
        )
        return WrittenRecipe(Entry({}), case_name, Entry({}), beside)
    name = _read_name(written, problem_log)
    base_field = written.fields.get("base")
    if base_field is None:
        original = (
            before if before is not None and before.is_mapping and "base" not in before.fields else written
        )
        return WrittenRecipe(written.without("name"), name or case_name, original.without("name"), beside)
    base = _read_base(base_field, folder, "recipe.base", problem_log)
    entry = merge_recipe(base, written.without("base", "name"))
    if name is None:
        return WrittenRecipe(entry, str(base_field.content), base, beside)
    named_before = before is not None and "base" in before.fields and "name" in before.fields
    original = (
        merge_recipe(base, before.without("base", "name")) if before is not None and named_before else entry
    )
    return WrittenRecipe(entry, name, original, beside)


def build_recipe(source: WrittenRecipe, problem_log: ProblemLog) -> tuple[Recipe, Entry]:
    """Return the recipe of `source` under its final name, and its fields including those of its preset."""
    entry = expand_preset(source.entry, problem_log)
    recipe = _find_weights(build_section(Recipe, entry, "recipe", problem_log, name=source.label), source)
    if source.entry == source.original:
        return recipe, entry
    aside = ProblemLog()
    written = build_section(Recipe, expand_preset(source.original, aside), "recipe", aside, name="")
    original = _find_weights(written, source)
    fingerprint = recipe.fingerprint()
    if not aside.problems and original.fingerprint() == fingerprint:
        return recipe, entry
    return recipe.model_copy(update={"name": f"{source.label}+{fingerprint[:8]}"}), entry


def _find_weights(recipe: Recipe, source: WrittenRecipe) -> Recipe:
    """Return the recipe with an absolute path of its weights: ranks may have another current folder."""
    model = recipe.model
    if model.weights is None:
        return recipe
    place = str((source.folder / Path(model.weights).expanduser()).resolve())
    return recipe.model_copy(update={"model": model.model_copy(update={"weights": place})})


def expand_preset(recipe: Entry, problem_log: ProblemLog) -> Entry:
    """Return `recipe` with the fields of its model's preset, overridden by the fields of the model."""
    model = recipe.fields.get("model")
    named = model.fields.get("preset") if model is not None else None
    if model is None or named is None or named.content is None or "factory" in model.fields:
        return recipe
    fields = _find_preset(named, problem_log)
    if fields is None:
        problem_log.broken.add("recipe.model")
        return Entry({**recipe.fields, "model": model.without("preset")}, recipe.place)
    expanded = merge(build_entry(dict(fields), named.place), model)
    return Entry({**recipe.fields, "model": expanded}, recipe.place)


def _find_preset(named: Entry, problem_log: ProblemLog) -> Mapping[str, object] | None:
    path = "recipe.model.preset"
    name = named.content
    if not isinstance(name, str):
        problem_log.reject(
            named, path, f"expected the name of a preset, got {show(named)}", suggest("", PRESETS)
        )
        return None
    if name not in PRESETS:
        problem_log.reject(named, path, f"unknown preset `{name}`", suggest(name, PRESETS))
        return None
    return PRESETS[name]


def _read_name(written: Entry, problem_log: ProblemLog) -> str | None:
    field = written.fields.get("name")
    if field is None:
        return None
    if not isinstance(field.content, str) or not NAME.fullmatch(field.content):
        problem_log.reject(field, "recipe.name", f"expected a name of {NAME_WORDS}, got {show(field)}")
        return None
    return field.content


def _read_base(named: Entry, folder: Path, path: str, problem_log: ProblemLog) -> Entry:
    """Return the fields of the recipe file that `named` names, or no fields after reporting a problem."""
    entry = read_recipe(named, folder, path, problem_log.report, ())
    if entry is None:
        problem_log.broken.add("recipe")
        return Entry({}, named.place)
    return entry


def override_recipe(written: Entry | None, change: Entry) -> Entry:
    """Return the field `recipe` of a case updated by an override. A recipe name becomes its `base`."""
    if not change.is_mapping or written is None:
        return change
    if isinstance(written.content, str):
        written = Entry({"base": written}, FileLine(FILE))
    return merge_recipe(written, change)
