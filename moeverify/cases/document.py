"""YAML reader that yields entries with line numbers and reports every unreadable file as a problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.events import (
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from moeverify.cases.entry import Entry, FileLine, Scalar, show
from moeverify.cases.suggest import find_nearest
from moeverify.errors import Problem
from moeverify.input_file import read_input

Report = Callable[[Problem], None]

_TAG = "tag:yaml.org,2002:"
_MOST_DEEP = 50
_UNSUSPECTED = 1 << 12
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # of signed and of unsigned integers of 64 bits

_SCALARS = tuple(_TAG + name for name in ("str", "int", "float", "bool", "null"))


@dataclass(frozen=True)
class Limits:
    """Limits on a file, and the remedy for one that exceeds them. Values repeated by aliases count each time."""

    num_bytes: int
    num_values: int
    remedy: str


# Far above the size of any case, and parsed in a few seconds at worst.
OF_CASES = Limits(1 << 16, 2000, "a case has a few dozen fields: write only these")


def read_document(path: Path, report: Report, *, fields: str = "`recipe:` and `layout:`") -> Entry | None:
    """Return the mapping in the YAML file `path`, or None after reporting a problem.

    `fields` names the fields that an empty file lacks, for the remedy.
    """
    file = str(path)
    if path.suffix == ".py":
        remedy = (
            "`moeverify init` writes cases for a model, and `moeverify watch -- python FILE` runs a script"
        )
        report(Problem("a case is a YAML file, and this file is a program", file, remedy=remedy))
        return None
    text = read_text(path, report, OF_CASES.num_bytes)
    entry = parse_text(text, file, report) if text is not None else None
    if entry is None or entry.is_mapping:
        return entry
    if entry.content is None:
        report(Problem("this file is empty", file, remedy=f"write {fields}"))
    else:
        kind = "a list" if isinstance(entry.content, list) else "a single value"
        message = f"expected a mapping of fields, got {kind}"
        report(Problem(message, file, entry.place.line, remedy="write `name: value` lines"))
    return None


def read_text(path: Path, report: Report, most: int) -> str | None:
    """Return the text of a file of at most `most` bytes, or None after reporting a problem."""
    file = str(path)
    try:
        raw = read_input(path, most)
    except FileNotFoundError:
        report(Problem("there is no such file", file, remedy=_name_sibling(path)))
        return None
    except OSError as error:
        report(Problem(f"this file cannot be read: {error.strerror or error}", file))
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"this file is not UTF-8 text (byte 0x{raw[error.start]:02x})"
        report(Problem(message, file, line, remedy="save it as UTF-8"))
        return None


def parse_text(
    text: str, file: str, report: Report, *, has_lines: bool = True, limits: Limits = OF_CASES
) -> Entry | None:
    """Return the single value in `text` (null if it is empty), or None after reporting a problem."""
    entry, problems = _parse(text, file, has_lines, limits)
    for problem in problems:
        report(problem)
    return entry


@lru_cache(maxsize=128)  # each case that uses a recipe as its base reads it again
def _parse(text: str, file: str, has_lines: bool, limits: Limits) -> tuple[Entry | None, tuple[Problem, ...]]:
    """Return the single value in `text`, or None, and the problems found."""
    yaml = YAML(typ="safe", pure=True)
    problems: list[Problem] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            _check_size(yaml, text, limits.num_values)
            node = yaml.compose(text)
        if node is None:
            return Entry(None, FileLine(file, 1 if has_lines else None)), ()
        builder = _Builder(yaml, file, problems.append, has_lines, limits.num_values)
        return builder.build(node, "", _line_of(node), ()), tuple(problems)
    except (YAMLError, RecursionError, _TooLarge) as error:
        return None, (*problems, _explain(error, text, file, has_lines, limits.remedy))


def _explain(error: Exception, text: str, file: str, has_lines: bool, remedy: str) -> Problem:
    """Return the problem of a text that the YAML reader or its limits reject."""
    if isinstance(error, MarkedYAMLError):
        return _translate(error, file, has_lines)
    if isinstance(error, YAMLError):
        position = getattr(error, "position", None)
        line = text[:position].count("\n") + 1 if position is not None and has_lines else None
        character = f" U+{ord(text[position]):04X}" if position is not None and position < len(text) else ""
        message = f"a control character{character} is not allowed in YAML"
        return Problem(message, file, line, remedy="delete it")
    message = str(error) if isinstance(error, _TooLarge) else "this is nested too deeply"
    return Problem(message, file, remedy=remedy)


def _line_of(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _TooLarge(Exception):
    """A document that exceeds the limits on values or nesting."""


def _check_size(yaml: YAML, text: str, most: int) -> None:
    """Reject a text that is too large or too deeply nested before the slow YAML reader runs.

    Raises: _TooLarge.
    """
    depth = 0
    for letter in text:  # the time of the YAML reader is quadratic in the number of open brackets
        depth += (letter in "[{") - (letter in "]}")
        _limit(0, depth, most)
    if len(text) <= _UNSUSPECTED:
        return
    num_values, depth = 0, 0
    for event in yaml.parse(text):
        num_values += isinstance(event, NodeEvent)
        depth += isinstance(event, MappingStartEvent | SequenceStartEvent)
        depth -= isinstance(event, MappingEndEvent | SequenceEndEvent)
        _limit(num_values, depth, most)


def _limit(num_values: int, depth: int, most: int) -> None:
    if depth > _MOST_DEEP:
        raise _TooLarge(f"this is nested too deeply: more than {_MOST_DEEP} levels")
    if num_values > most:
        raise _TooLarge(f"this means more than {most} values, including repetitions by aliases")


class _Builder:
    """Converts YAML nodes to entries and reports YAML features that a case does not support."""

    def __init__(self, yaml: YAML, file: str, report: Report, has_lines: bool, most: int) -> None:
        self.yaml = yaml
        self.most = most
        self.file = file
        self.report = report
        self.has_lines = has_lines
        self._num_values = 0

    def build(self, node: Node, path: str, line: int, parents: tuple[int, ...]) -> Entry:
        """Return the entry of `node` at the dotted `path`. `line` is the line of its key."""
        self._num_values += 1
        _limit(self._num_values, len(parents), self.most)
        place = FileLine(self.file, line if self.has_lines else None)
        if id(node) in parents:
            self._reject("this alias contains itself", path, line, "write the value out")
            return Entry(None, place)
        inside = (*parents, id(node))
        if isinstance(node, MappingNode):
            return Entry(self._build_fields(node, path, inside), place)
        if isinstance(node, SequenceNode):
            items = [
                self.build(item, f"{path}[{index}]", _line_of(item), inside)
                for index, item in enumerate(node.value)
            ]
            return Entry(items, place)
        return Entry(self._read_scalar(node, path, line), place)

    def _build_fields(self, node: MappingNode, path: str, inside: tuple[int, ...]) -> dict[str, Entry]:
        fields: dict[str, Entry] = {}
        for key, value in node.value:
            line = _line_of(key)
            if not isinstance(key, ScalarNode):
                self._reject("a field's name must be text", path, line, "write `name: value`")
                continue
            name = str(key.value)
            inner = f"{path}.{name}" if path else name
            if key.tag == _TAG + "merge":
                self._reject("merge keys are not supported", inner, line, "use `base:` in the recipe")
                continue
            if name in fields:
                first = fields[name].place.line
                where = f" (first on line {first})" if first is not None else ""
                self._reject(f"the field `{name}` is given twice{where}", inner, line, "delete one of them")
                continue
            fields[name] = self.build(value, inner, line, inside)
        return fields

    def _read_scalar(self, node: Node, path: str, line: int) -> Scalar:
        tag = str(node.tag)
        if tag not in _SCALARS:
            kind = tag.removeprefix(_TAG)
            self._reject(
                f"a value of the YAML type `{kind}` is not supported",
                path,
                line,
                "write it in quotes, as text",
            )
            return None
        try:
            value: Scalar = self.yaml.constructor.construct_object(node)
        except (YAMLError, ValueError):
            self._reject(
                f"`{str(node.value)[:60]}` cannot be read as `{tag.removeprefix(_TAG)}`", path, line, ""
            )
            return None
        if isinstance(value, int) and not _LEAST <= value <= _MOST:
            self._reject(f"{show(Entry(value))} is beyond 64 bits", path, line, "write a smaller number")
            return None
        return value

    def _reject(self, message: str, path: str, line: int, remedy: str) -> None:
        self.report(Problem(message, self.file, line if self.has_lines else None, path, remedy))


def _translate(error: MarkedYAMLError, file: str, has_lines: bool) -> Problem:
    """Return the problem for a syntax error of the YAML reader, in terms of a case file."""
    message = (error.problem or "this is no YAML").strip()
    mark = error.problem_mark or error.context_mark
    line = int(mark.line) + 1 if mark is not None else None
    remedy = closing = ""
    if "'\\t'" in message:
        message, remedy = "a tab cannot indent YAML", "use spaces"
    elif "another document" in message:
        message, remedy = "a second document begins here (`---`)", "write one case a file"
    elif "<stream end>" in message:
        message = f"the text ends too early: {message}"
        closing = "close every bracket and quote"
    elif "mapping values are not allowed" in message:
        message, remedy = (
            "a second `:` in one value, or wrong indentation",
            "put the value in quotes, or align the line",
        )
    else:
        message = f"broken YAML: {message}"
        closing = "write `name: value` lines, and put text with special characters in quotes"
    if error.context and not remedy:
        message += f" ({error.context.strip()})"
    return Problem(message, file, line if has_lines else None, remedy=remedy or closing)


def _name_sibling(path: Path) -> str:
    siblings = sorted(path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    nearest = find_nearest(path.stem, [sibling.stem for sibling in siblings])
    if nearest is None:
        return "give the path of a file from the current folder"
    return f"did you mean `{path.with_name(nearest + '.yaml')}`?"
