"""Files of `recipes/`: one recipe per file, optionally based on another one."""

from __future__ import annotations

from pathlib import Path

from moeverify.cases.document import Report, read_document
from moeverify.cases.entry import Entry, merge, show
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
