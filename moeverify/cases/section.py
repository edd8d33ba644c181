"""Conversion of entries to sections of the schema, with each wrong field reported at its own line.

A wrong field does not stop the conversion. A placeholder replaces it and its path is recorded as broken, so
that all rules that do not read it still run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from moeverify.cases.entry import Entry, show
from moeverify.cases.expectation import Rejected, expect, find_sections, index_fields, is_nullable
from moeverify.cases.fields import Section
from moeverify.cases.schema import CustomModel, Recipe, ReferenceModel
from moeverify.cases.suggest import enumerate_names, find_nearest, suggest
from moeverify.errors import Problem

S = TypeVar("S", bound=Section)


_MOST_UNKNOWN = 20


class ProblemLog:
    """Collection of distinct problems, and of the dotted paths of unreadable fields.

    `meant` holds the paths that unknown fields probably meant. Their defaults were not chosen by the user.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._known: set[Problem] = set()
        self.broken: set[str] = set()
        self.meant: set[str] = set()

    def report(self, problem: Problem) -> None:
        """Add `problem` unless it is already known."""
        if problem not in self._known:
            self._known.add(problem)
            self.problems.append(problem)

    def reject(self, entry: Entry, path: str, message: str, remedy: str = "") -> None:
        """Report a problem of the field at `path`, and mark the field as broken."""
        self.report(Problem(message, entry.place.file, entry.place.line, path, remedy))
        self.broken.add(path)

    def is_broken(self, path: str) -> bool:
        """Return whether the field at `path`, or a section around it, is broken."""
        return any(path == broken or path.startswith(broken + ".") for broken in self.broken)


def build_section(section: type[S], entry: Entry, path: str, problem_log: ProblemLog, **given: Any) -> S:
    """Return the `section` of `entry`, with placeholders for wrong values. `given` are ready values."""
    valid = _build_valid(section, entry, given)
    if valid is not None:
        return valid
    if not entry.is_mapping:
        problem_log.reject(
            entry, path, f"expected a mapping of fields, got {show(entry)}", "write `name: value` lines"
        )
    names = [name for name in section.model_fields if name not in given]
    report_unknown(entry, names, path, problem_log)
    values = dict(given)
    missing: list[str] = []
    for name in names:
        if name in entry.fields:
            values[name] = _build_field(section, name, entry.fields[name], f"{path}.{name}", problem_log)
        elif section.model_fields[name].is_required():
            missing.append(name)
            values[name] = _invent_field(section, name)
    _report_missing(section, missing, entry, path, problem_log)
    return section(**values)


def _build_valid(section: type[S], entry: Entry, given: Mapping[str, Any]) -> S | None:
    """Return the section if it is valid.

    Conversion field by field, with messages, takes ten times as long.
    """
    if not entry.is_mapping or given.keys() & entry.fields.keys():
        return None
    try:
        return section.model_validate_json(json.dumps({**entry.plain(), **given}))
    except ValidationError:
        return None


def _build_field(section: type[Section], name: str, entry: Entry, path: str, problem_log: ProblemLog) -> Any:
    options = find_sections(section, name)
    if options and not (entry.content is None and is_nullable(section, name)):
        return build_section(_choose(options, entry), entry, path, problem_log)
    if options:
        return None
    expectation = expect(section, name)
    try:
        return expectation.read(entry)
    except Rejected:
        nearest = find_nearest(str(entry.content), expectation.choices)
        remedy = f"did you mean `{nearest}`?" if nearest else ""
        problem_log.reject(entry, path, f"expected {expectation.words}, got {show(entry)}", remedy)
        return expectation.stand_in


def _choose(options: tuple[type[Section], ...], entry: Entry) -> type[Section]:
    """Return the section that the user means: a model with a `factory` is a `CustomModel`."""
    if CustomModel in options and "factory" in entry.fields:
        return CustomModel
    return options[0]


def _invent_field(section: type[Section], name: str) -> Any:
    options = find_sections(section, name)
    if options:
        return build_section(options[0], Entry({}), "", ProblemLog())
    return expect(section, name).stand_in


def report_unknown(entry: Entry, names: Iterable[str], path: str, problem_log: ProblemLog) -> None:
    """Report each field of the mapping `entry` that is not in `names`, and suggest where it belongs."""
    known = list(names)
    prefix = f"{path}." if path else ""
    unknown = {name: field for name, field in entry.fields.items() if name not in known}
    for number, (name, field) in enumerate(unknown.items()):
        if number == _MOST_UNKNOWN:  # each search for a suggestion takes milliseconds
            message = f"and {len(unknown) - number} more unknown fields"
            problem_log.reject(
                field, prefix + name, message, "write the fields that `moeverify schema` lists"
            )
            return
        elsewhere = [place for place in index_fields().get(name, ()) if place != prefix + name]
        nearest = find_nearest(name, known)
        remedy = _find_remedy(name, prefix + name, known, elsewhere)
        problem_log.reject(field, prefix + name, f"unknown field `{name}`", remedy)
        problem_log.meant.update(elsewhere)
        if nearest is not None:
            problem_log.meant.add(prefix + nearest)


def _find_remedy(name: str, path: str, known: list[str], elsewhere: list[str]) -> str:
    """Return a suggestion for the unknown field `name` at `path`, which belongs to the paths `elsewhere`."""
    if elsewhere:
        return f"move it to {' or '.join(f'`{place}`' for place in elsewhere)}"
    if path in index_fields().get(name, ()):
        return "a model has either a `factory` or sizes of its own: remove one of them"
    if find_nearest(name, known) is None and (distant := find_nearest(name, index_fields())) is not None:
        return f"did you mean `{index_fields()[distant][0]}`?"
    return suggest(name, known)


def _report_missing(
    section: type[Section], missing: list[str], entry: Entry, path: str, problem_log: ProblemLog
) -> None:
    if not missing or problem_log.is_broken(path):
        return
    problem_log.broken.update(f"{path}.{name}" for name in missing)
    noun = "field" if len(missing) == 1 else "fields"
    if section is ReferenceModel:
        remedy = "write all of them, or start from a preset: `preset: stress`"
    elif section is Recipe:
        remedy = "write `model: {preset: stress}`"
    elif len(missing) == 1:
        remedy = f"write {expect(section, missing[0]).words}"
    else:
        remedy = "write them"
    message = f"missing {noun} {enumerate_names(missing)}"
    problem_log.report(Problem(message, entry.place.file, entry.place.line, path, remedy))
