"""Loading of cases from paths: all valid cases, or one error with every problem of all files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moeverify.cases.document import Report, read_document
from moeverify.cases.entry import Entry, FileLine, build_entry, merge, show
from moeverify.cases.fields import Section
from moeverify.cases.override import FILE as OVERRIDE
from moeverify.cases.override import Override, parse_overrides
from moeverify.cases.recipe_source import NAME, NAME_WORDS, build_recipe, override_recipe, resolve_recipe
from moeverify.cases.schema import Case, Checkpoint, Checks, Layout, Recipe
from moeverify.cases.section import ProblemLog, build_section, report_unknown
from moeverify.cases.select import Match, read_pattern
from moeverify.cases.suggest import enumerate_names
from moeverify.cases.validation.rules import validate
from moeverify.errors import CaseError, Problem
from moeverify.tools.placement.placement_file import FILE_ENDINGS, read_placement

S = TypeVar("S", bound=Section)

_FIELDS = ("name", "description", "recipe", "layout", "checks", "checkpoint")


@dataclass(frozen=True)
class _Built:
    """A case from a file, valid or not, with the tree that has its line numbers."""

    case: Case
    tree: Entry
    is_valid: bool


@dataclass(frozen=True)
class LoadedCases:
    """The selected valid cases, the problems of all other files, and these `refused` files."""

    cases: list[Case]
    problems: list[Problem]
    refused: list[Path]


def load_cases(
    paths: Sequence[Path], *, overrides: Sequence[str] = (), pattern: str | None = None
) -> list[Case]:
    """Return the cases of `paths` in order.

    A path is a file, or a folder with `*.yaml` files directly in it. `overrides` are texts such as
    `layout.tp=2`, applied to each selected case. `pattern` selects cases by words in their names (`fsdp and
    not cp`). Files that are not selected must be valid too, without overrides. For example,
    `load_cases([Path("cases")], overrides=["layout.tp=2"])`.

    Raises: CaseError when any file or option has a problem; it has all problems of all files.
    """
    loaded = load_valid_cases(paths, overrides=overrides, pattern=pattern)
    if loaded.problems:
        raise CaseError(loaded.problems)
    return loaded.cases


def load_valid_cases(
    paths: Sequence[Path], *, overrides: Sequence[str] = (), pattern: str | None = None
) -> LoadedCases:
    """Return the cases of `paths` like `load_cases`, without refused files from folders.

    Raises: CaseError with all problems of all files, when a file named in `paths` is refused, an option is
        wrong, or no case remains.
    """
    problem_log = ProblemLog()
    changes = parse_overrides(overrides, problem_log.report)
    match = _read_pattern(pattern, problem_log.report)
    files = find_files(paths, problem_log.report)
    must_stop = bool(problem_log.problems)
    trees, refused = _read_documents(files, problem_log)
    chosen = [(path, tree, match(_name_of(path, tree))) for path, tree in trees]
    if trees and not any(is_chosen for _, _, is_chosen in chosen):
        names = enumerate_names(_name_of(path, tree) for path, tree in trees)
        problem_log.report(
            Problem(f"no case matches `{pattern}`", path="-k", remedy=f"the cases are {names}")
        )
    built = [
        _build_case(path, tree, changes if is_chosen else [], problem_log) for path, tree, is_chosen in chosen
    ]
    doubles = [*_report_same_names(built, problem_log), *_report_same_recipes(built, problem_log)]
    refused |= {Path(item.case.file) for item in built if not item.is_valid or item in doubles}
    cases = [
        item.case
        for item, (path, _, is_chosen) in zip(built, chosen, strict=True)
        if is_chosen and path not in refused
    ]
    must_stop |= any(problem.file in ("-k", OVERRIDE) for problem in problem_log.problems)
    if problem_log.problems and (must_stop or not cases or not refused.isdisjoint(paths)):
        raise CaseError(_order(problem_log.problems))
    return LoadedCases(cases, _order(problem_log.problems), [path for path in files if path in refused])


def _read_documents(
    files: Sequence[Path], problem_log: ProblemLog
) -> tuple[list[tuple[Path, Entry]], set[Path]]:
    """Return the readable tree of each file, and the files with problems."""
    trees: list[tuple[Path, Entry]] = []
    refused: set[Path] = set()
    for path in files:
        own = ProblemLog()
        tree = read_document(path, own.report)
        if tree is not None:
            trees.append((path, tree))
        if own.problems:
            refused.add(path)
        for problem in own.problems:
            problem_log.report(problem)
    return trees, refused


def build_case(fields: Mapping[str, Any]) -> Case:
    """Return the case of a file with these fields; its `file` is empty.

    Raises: CaseError with all problems.
    """
    problem_log = ProblemLog()
    built = _build_case(Path("case"), build_entry(dict(fields), FileLine()), [], problem_log)
    if problem_log.problems:
        raise CaseError(problem_log.problems)
    return built.case.model_copy(update={"file": ""})


def find_files(paths: Sequence[Path], report: Report) -> list[Path]:
    """Return the distinct case files of `paths`; a folder contributes the `*.yaml` files directly in it.

    Empty folders, and empty `paths`, are reported as problems.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        found = sorted(path.glob("*.yaml"), key=lambda file: file.stem) if path.is_dir() else [path]
        if not found:
            has_others = any(path.glob("*.yml"))
            remedy = (
                "rename `.yml` files to `.yaml`"
                if has_others
                else "give a folder with `*.yaml` files, or a file"
            )
            report(Problem("there is no case in this folder", str(path), remedy=remedy))
        for file in found:
            files.setdefault(Path(os.path.realpath(file)), file)  # `resolve` raises on circular links
    if not paths:
        report(Problem("no case was given", remedy="give files, or a folder such as `cases`"))
    return list(files.values())


def _order(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems grouped by file and sorted by line."""
    files = list(dict.fromkeys(problem.file for problem in problems))
    return sorted(problems, key=lambda problem: (files.index(problem.file), problem.line or 0))


def _read_pattern(pattern: str | None, report: Report) -> Match:
    try:
        return read_pattern(pattern)
    except CaseError as error:
        for problem in error.problems:
            report(problem)
        return read_pattern(None)


def _name_of(path: Path, tree: Entry) -> str:
    """Return the name of the case in `path`: its field `name`, or else the stem of the file."""
    field = tree.fields.get("name")
    return field.content if field is not None and isinstance(field.content, str) else path.stem


def _build_case(path: Path, tree: Entry, overrides: Sequence[Override], problem_log: ProblemLog) -> _Built:
    """Return the case of one file, and report its problems to `problem_log`."""
    own = ProblemLog()
    before = tree.fields.get("recipe")
    tree = _override(tree, overrides)
    report_unknown(tree, _FIELDS, "", own)
    name = _read_name(path, tree, own)
    recipe, recipe_tree = _build_recipe(path, tree, before, name, own)
    case = Case(
        name=name,
        description=_read_description(tree, own),
        file=str(path),
        recipe=recipe,
        layout=_read_files(_build_optional(Layout, "layout", tree, own), path.parent, own, tree),
        checks=_build_optional(Checks, "checks", tree, own),
        checkpoint=_build_optional(Checkpoint, "checkpoint", tree, own),
    )
    whole = Entry({**tree.fields, "recipe": recipe_tree}, dataclasses.replace(tree.place, line=None))
    own.broken.update(path for path in own.meant if not whole.has(path.split(".")))
    for problem in validate(case, is_broken=own.is_broken):
        place = whole.locate(problem.path.split("."))
        own.report(dataclasses.replace(problem, file=place.file, line=place.line))
    for problem in own.problems:
        problem_log.report(problem)
    return _Built(case, whole, not own.problems)


def _build_optional(section: type[S], name: str, tree: Entry, problem_log: ProblemLog) -> S:
    return build_section(section, tree.fields[name], name, problem_log) if name in tree.fields else section()


def _read_files(layout: Layout, folder: Path, problem_log: ProblemLog, tree: Entry) -> Layout:
    """Return the layout with placement matrices in place of the names of placement files."""
    exchange = {
        after: _read_file(given, folder, f"layout.exchange.{after}", problem_log, tree)
        for after, given in layout.exchange.items()
    }
    placement = _read_file(layout.placement, folder, "layout.placement", problem_log, tree)
    return layout.model_copy(update={"placement": placement, "exchange": exchange})


def _read_file(given: Any, folder: Path, path: str, problem_log: ProblemLog, tree: Entry) -> Any:
    if not isinstance(given, str) or not given.endswith(FILE_ENDINGS):
        return given
    if not (folder / given).exists():
        place = tree.locate(path.split("."))
        message = f"there is no file {folder / given}"
        problem_log.report(
            Problem(message, place.file, place.line, path, "paths are relative to the case file")
        )
        problem_log.broken.add(path)
        return given
    try:
        placement = read_placement(folder / given)
    except CaseError as error:
        for problem in error.problems:
            problem_log.report(problem)
        problem_log.broken.add(path)
        return given
    by_layer = {
        str(layer): matrix for layer, matrix in zip(placement.layers, placement.matrices, strict=False)
    }
    return by_layer or placement.matrices[0]


def _override(tree: Entry, overrides: Sequence[Override]) -> Entry:
    for override in overrides:
        change = override.entry
        if "recipe" in change.fields:
            recipe = override_recipe(tree.fields.get("recipe"), change.fields["recipe"])
            tree = Entry({**tree.fields, "recipe": recipe}, tree.place)
        else:
            tree = merge(tree, Entry(change.content, tree.place))
    return tree


def _read_name(path: Path, tree: Entry, problem_log: ProblemLog) -> str:
    field = tree.fields.get("name")
    if field is None:
        if not NAME.fullmatch(path.stem):
            message = f"the file's stem `{path.stem}` cannot name a case, which takes {NAME_WORDS}"
            problem_log.report(Problem(message, str(path), remedy="rename the file, or write `name:`"))
        return path.stem
    if not isinstance(field.content, str) or not NAME.fullmatch(field.content):
        problem_log.reject(field, "name", f"expected a name of {NAME_WORDS}, got {show(field)}")
        return path.stem
    return field.content


def _read_description(tree: Entry, problem_log: ProblemLog) -> str:
    field = tree.fields.get("description")
    if field is None:
        return ""
    if not isinstance(field.content, str):
        problem_log.reject(field, "description", f"expected text, got {show(field)}", "put it in quotes")
        return ""
    return field.content


def _build_recipe(
    path: Path, tree: Entry, before: Entry | None, case_name: str, problem_log: ProblemLog
) -> tuple[Recipe, Entry]:
    """Return the recipe of the case, and its fields with their source positions."""
    written = tree.fields.get("recipe")
    if written is None:
        remedy = "name a file of `recipes/`, or write the fields"
        problem_log.report(
            Problem("missing field `recipe`", tree.place.file, tree.place.line, "recipe", remedy)
        )
        problem_log.broken.add("recipe")
        written = Entry({}, tree.place)
    return build_recipe(resolve_recipe(written, before, case_name, path.parent, problem_log), problem_log)


def _report_same_names(built: Sequence[_Built], problem_log: ProblemLog) -> Iterator[_Built]:
    """Report and yield each case whose name an earlier file already has."""
    first: dict[str, _Built] = {}
    for item in built:
        other = first.setdefault(item.case.name, item)
        if other is not item:
            field = item.tree.fields.get("name")
            line = field.place.line if field is not None else None
            message = f"the name `{item.case.name}` is also that of {other.case.file}"
            problem_log.report(
                Problem(message, item.case.file, line, "name", "give one of them another `name:`")
            )
            yield item


def _report_same_recipes(built: Sequence[_Built], problem_log: ProblemLog) -> Iterator[_Built]:
    """Report different recipes with one name, which would share one golden, and yield their cases."""
    first: dict[str, _Built] = {}
    for item in built:
        recipe = item.case.recipe
        if not item.is_valid:
            continue
        other = first.setdefault(recipe.name, item)
        if other.case.recipe.fingerprint() != recipe.fingerprint():
            place = item.tree.fields["recipe"].place
            message = f"this recipe is called `{recipe.name}` like the different one of {other.case.file}"
            problem_log.report(
                Problem(message, place.file, place.line, "recipe", "give one of them another `name:`")
            )
            yield item
