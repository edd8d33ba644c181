"""`--set a.b=v`: overrides one field of every chosen case from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moeverify.cases.document import Report, parse_text
from moeverify.cases.entry import Entry, FileLine
from moeverify.cases.expectation import index_fields
from moeverify.cases.suggest import enumerate_names, find_nearest, suggest
from moeverify.errors import Problem

FILE = "--set"


@dataclass(frozen=True)
class Override:
    """The dotted path of a field, split, and its new value."""

    path: tuple[str, ...]
    value: Entry

    @property
    def entry(self) -> Entry:
        """Return the override in the form of a case file."""
        entry = self.value
        for name in reversed(self.path):
            entry = Entry({name: entry}, FileLine(FILE))
        return entry


def parse_overrides(texts: Sequence[str], report: Report) -> list[Override]:
    """Return the overrides in `texts`. Report each text that is not `path=value` with a known path."""
    overrides = (_parse(text, report) for text in texts)
    return [override for override in overrides if override is not None]


def _parse(text: str, report: Report) -> Override | None:
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    if not equals or not dotted:
        report(
            Problem(f"expected `path=value`, got `{text}`", FILE, remedy="write for example `layout.tp=2`")
        )
        return None
    known = [path for paths in index_fields().values() for path in paths]
    if dotted not in known and not dotted.startswith(("recipe.model.arguments.", "layout.arguments.")):
        remedy = _find_remedy(dotted, known)
        report(Problem("there is no such field", FILE, None, dotted, remedy))
        return None
    entry = parse_text(value, FILE, lambda problem: report(replace(problem, path=dotted)), has_lines=False)
    return Override(tuple(dotted.split(".")), entry) if entry is not None else None


def _find_remedy(dotted: str, known: list[str]) -> str:
    """Return a suggestion for a misplaced field: `layout.tp` for `tp`, `recipe.seed` for `layout.seed`."""
    section, dot, name = dotted.rpartition(".")
    same_name = index_fields().get(name, ())
    if same_name:
        return "did you mean " + " or ".join(f"`{path}`" for path in same_name) + "?"
    siblings = [path.rpartition(".")[2] for path in known if path.rpartition(".")[0] == section]
    nearest = find_nearest(name, siblings)
    if nearest is not None:
        return f"did you mean `{section}{dot}{nearest}`?"
    return f"choose from {enumerate_names(siblings)}" if siblings else suggest(dotted, known)


def label_values(values: Mapping[str, str]) -> str:
    """Return a suffix for the name of a case with these values by path; sections are left out: `ep=2 tp=1`."""
    return " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in values.items())
