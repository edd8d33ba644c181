"""Planted bugs as data: the run and the ground truth, with lines read from markers in the source.

A file in `plants/` has the plants and the clean cases of one stack. The wrong lines of a plant are those
that end in a comment `# plant: ID`, anywhere in the stack's folder. A marker covers its whole statement; on
a `def` line of an omission it covers the whole function.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STACKS = HERE / "stacks"
PLANTS = HERE / "plants"
BUILTIN = "builtin"

KINDS = (
    "edit",  # a wrong operator, operand, constant, dim, index, order or dtype
    "reduction",  # a collective that is missing, additional, or of a wrong operation or axis
    "scale",  # a wrong factor or divisor
    "state",  # stale, not loaded, overwritten, a wrong initial value, a lost update
    "elsewhere",  # right values in a wrong place, tensor or rank
    "race",
    "data",  # the data that a rank read
    "optimizer",
    "dtype",
    "layout",  # missing or doubled layers or parameters
    "loop",  # the order or number of calls such as zero_grad, clip, step
)

_MARKER = re.compile(r"#.*?\bplant: ([\w. -]+)$")
_ANCHOR = re.compile(r"# anchor: ([\w -]+)$")
_HELD_SEED = 20261127


class PlantError(ValueError):
    """A file of plants, or a marker, that cannot be read."""


@dataclass(frozen=True)
class Line:
    """Lines `first` to `last` of a file, with its path relative to the folder of the stack's package."""

    file: str
    first: int
    last: int

    def covers(self, file: str, number: int) -> bool:
        """Return whether a line of a file is one of these. The path may have any leading folders."""
        parts, own = Path(file).parts, Path(self.file).parts
        common = min(len(parts), len(own))
        return parts[-common:] == own[-common:] and self.first <= number <= self.last


@dataclass(frozen=True)
class Truth:
    """The ground truth: `kind`, culprit parameters and modules as globs, mesh axes, and one sentence.

    A claim of a kind in `also` is right as well. `omission` marks missing code, so the lines are those
    where an engineer would insert it. `counterparts` are lines of the plain code with the right operation,
    which a claim may name in addition. `files` are all files of the stack.
    """

    kind: str
    says: str
    tensors: tuple[str, ...]
    axes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    omission: bool = False
    lines: tuple[Line, ...] = ()
    counterparts: tuple[Line, ...] = ()
    files: tuple[str, ...] = ()

    def owns(self, line: tuple[str, int]) -> bool:
        """Return whether a line is in one of the stack's own files, with any leading folders."""
        return any(Line(file, 1, line[1]).covers(*line) for file in self.files)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return all kinds that a right claim may have."""
        return (self.kind, *self.also)


@dataclass(frozen=True)
class Plant:
    """One planted bug, or a clean case, which has no truth.

    `way` is `run`, `reshard` or `watch`. `case` has the fields of a case file, or for `watch` those of
    `Watch` in the file. `held` plants are not used for developing the diagnosis. `package` has an own copy of
    the stack, see `fold.py`.
    """

    id: str
    stack: str
    case: Mapping[str, Any]
    way: str = "run"
    fault: str = ""
    source: str = ""
    mechanism: str = ""
    precisions: tuple[str, ...] = ("float64",)
    held: bool = False
    truth: Truth | None = None
    recipes: tuple[Path, ...] = field(default=(), compare=False)
    package: Path | None = field(default=None, compare=False)

    @property
    def is_clean(self) -> bool:
        """Return whether there is no bug in it."""
        return self.truth is None

    @property
    def num_ranks(self) -> int:
        """Return the number of required ranks."""
        if self.way == "watch":
            return int(self.case.get("num_ranks", 2))
        count = 1
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
            count *= int(self.case["layout"].get(axis, 1))
        return count


def is_drawn(name: str) -> bool:
    """Return whether a plant is held out: about a third are, by a draw that depends on the id alone."""
    digest = hashlib.sha256(f"{_HELD_SEED}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 3 == 0


def list_stacks() -> list[str]:
    """Return the names of all stacks, as in their files of plants."""
    return sorted(path.stem for path in PLANTS.glob("*.yaml"))


def load_plants(stacks: Sequence[str] = ()) -> list[Plant]:
    """Return all plants and clean cases of some stacks, of all by default. Raises: PlantError."""
    found = [plant for stack in stacks or list_stacks() for plant in load_stack(stack)]
    ids = [plant.id for plant in found]
    if doubled := sorted({name for name in ids if ids.count(name) > 1}):
        raise PlantError(f"several plants have the id {', '.join(doubled)}")
    return found


def load_stack(stack: str) -> list[Plant]:
    """Return the plants and clean cases of one stack. Raises: PlantError when one is incomplete."""
    path = PLANTS / f"{stack}.yaml"
    if not path.is_file():
        raise PlantError(f"there is no stack `{stack}`; there are {', '.join(list_stacks())}")
    data = YAML(typ="safe").load(path)
    folder = PLANTS / BUILTIN if stack == BUILTIN else STACKS / stack
    markers, anchors = find_markers(folder), find_markers(folder, anchors=True)
    recipes = [folder / "recipes"] + ([ROOT / "cases" / "recipes"] if stack == BUILTIN else [])
    files = tuple(str(path.relative_to(folder.parent)) for path in sorted(folder.rglob("*.py")))
    plants = []
    for entry in data["clean"]:
        plants.append(_read_plant(dict(entry), stack, {}, {}, (), tuple(recipes), is_clean=True))
    for entry in data["plants"]:
        plants.append(
            _read_plant(dict(entry), stack, markers, anchors, files, tuple(recipes), is_clean=False)
        )
    known = {plant.id for plant in plants}
    if lost := sorted(set(markers) - known):
        raise PlantError(f"{stack}: there are markers of no plant: {', '.join(lost)}")
    return plants


def _read_plant(
    entry: dict[str, Any],
    stack: str,
    markers: Mapping[str, Sequence[Line]],
    anchors: Mapping[str, Sequence[Line]],
    files: tuple[str, ...],
    recipes: tuple[Path, ...],
    *,
    is_clean: bool,
) -> Plant:
    name = entry.pop("id")
    ways = [way for way in ("case", "reshard", "watch") if way in entry]
    if len(ways) != 1:
        raise PlantError(f"{name}: one of `case`, `reshard` and `watch` says what to run")
    case = entry.pop(ways[0])
    truth = None
    if not is_clean:
        truth = _read_truth(name, entry.pop("truth", None), markers.get(name, ()), anchors, files)
        for key in ("source", "mechanism"):
            if not entry.get(key):
                raise PlantError(f"{name}: `{key}` is missing")
    try:
        return Plant(
            id=name,
            stack=stack,
            case=case,
            way={"case": "run"}.get(ways[0], ways[0]),
            truth=truth,
            precisions=tuple(entry.pop("precisions", ["float64"])),
            recipes=recipes,
            **entry,
        )
    except TypeError as error:
        raise PlantError(f"{name}: {error}") from None


def _read_truth(
    name: str,
    data: Any,
    lines: Sequence[Line],
    anchors: Mapping[str, Sequence[Line]],
    files: tuple[str, ...],
) -> Truth:
    if not isinstance(data, dict):
        raise PlantError(f"{name}: `truth` is missing")
    if not lines:
        raise PlantError(f"{name}: no line of the source ends in `# plant: {name}`")
    data = dict(data)
    kinds = [data.get("kind"), *data.get("also", [])]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise PlantError(f"{name}: {unknown} are no kinds; there are {', '.join(KINDS)}")
    if not data.get("says") or not data.get("tensors"):
        raise PlantError(f"{name}: the truth says nothing, or has no tensors")
    omission = bool(data.get("omission"))
    kept = [_narrow(line, omission=omission) for line in lines]
    wanted = data.pop("anchors", [])
    if lost := [anchor for anchor in wanted if anchor not in anchors]:
        raise PlantError(f"{name}: there are no anchors {', '.join(lost)} in the source")
    counterparts = [_narrow(line, omission=False) for anchor in wanted for line in anchors[anchor]]
    try:
        return Truth(
            kind=data.pop("kind"),
            says=data.pop("says"),
            tensors=tuple(data.pop("tensors")),
            axes=tuple(data.pop("axes", ())),
            also=tuple(data.pop("also", ())),
            omission=bool(data.pop("omission", False)),
            lines=tuple(kept),
            counterparts=tuple(counterparts),
            files=files,
            **data,
        )
    except TypeError as error:
        raise PlantError(f"{name}: {error}") from None


@dataclass(frozen=True)
class _Marked(Line):
    """A marked statement. `body_last` is the last line of the function if it is a `def` line."""

    body_last: int = 0


def _narrow(line: Line, *, omission: bool) -> Line:
    last = line.body_last if omission and isinstance(line, _Marked) and line.body_last else line.last
    return Line(line.file, line.first, last)


@functools.cache
def find_markers(folder: Path, *, anchors: bool = False) -> Mapping[str, tuple[Line, ...]]:
    """Return the marked statements of a folder's Python files, by id; with `anchors` the anchors, by name."""
    found: dict[str, list[Line]] = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        marked = list(_list_marks(text, _ANCHOR if anchors else _MARKER))
        if not marked:
            continue
        spans = _list_spans(text)
        for number, ids in marked:
            first, last, body_last = _find_span(spans, number)
            for name in ids:
                line = _Marked(str(path.relative_to(folder.parent)), first, last, body_last)
                found.setdefault(name, []).append(line)
    return {name: tuple(dict.fromkeys(lines)) for name, lines in found.items()}


def _list_marks(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := pattern.search(line.rstrip()):
            yield number, match.group(1).split()


def _list_spans(text: str) -> list[tuple[int, int, int]]:
    """Return (first, last, last of the body or 0) of every simple statement and of the other heads."""
    spans = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt):
            continue
        last, body_last = node.end_lineno or node.lineno, 0
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            inner = (ast.stmt, ast.excepthandler, ast.match_case)
            head = [child for child in ast.iter_child_nodes(node) if not isinstance(child, inner)]
            ends = [getattr(child, "end_lineno", 0) or 0 for child in head]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body_last = last
            last = max([node.lineno, *ends])
        spans.append((node.lineno, last, body_last))
    return spans


def _find_span(spans: Sequence[tuple[int, int, int]], number: int) -> tuple[int, int, int]:
    """Return the smallest span with a line, or the line alone if it is in none, as in a comment."""
    around = [span for span in spans if span[0] <= number <= span[1]]
    return min(around, key=lambda span: span[1] - span[0], default=(number, number, 0))


def choose(plants: Sequence[Plant], patterns: Sequence[str], *, clean: bool, group: str = "") -> list[Plant]:
    """Return plants whose id matches one of some globs, clean or planted ones; `group` is held or open."""
    kept = [plant for plant in plants if plant.is_clean == clean]
    if group:
        kept = [plant for plant in kept if plant.is_clean or plant.held == (group == "held")]
    if patterns:
        kept = [plant for plant in kept if any(fnmatch(plant.id, pattern) for pattern in patterns)]
    return kept
