"""Placements in YAML or JSON files: one matrix for all MoE layers, or one for each.

    num_experts: 4
    layers:
      1: [[0, 3], [1, 2], [1, 2], [0, 3]]
      2: [[0, 1], [1, 2], [2, 3], [3, 0]]

`matrix:` instead of `layers:` applies to every MoE layer. A file may also contain only the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from moeverify.cases.document import Limits, parse_text, read_text
from moeverify.cases.entry import Entry
from moeverify.errors import CaseError, Problem
from moeverify.json_file import find_line, parse_json
from moeverify.tools.placement.placement import MOST_EXPERTS, Matrix, Placement

FILE_ENDINGS = (".yaml", ".yml", ".json")

_FIELDS = ("num_experts", "matrix", "layers")
_REMEDY = (
    "write `matrix: [[0, 3], [1, 2]]`, a row for each rank, or `layers:` with a matrix for each MoE layer"
)
# In YAML; of JSON, only the bytes count.
_OF_PLACEMENTS = Limits(1 << 24, 100_000, "write it as JSON")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def read_placement(path: Path) -> Placement:
    """Return the placement in a file.

    Raises: CaseError with all problems, each with its line.
    """
    problems: list[Problem] = []
    text = read_text(path, problems.append, _OF_PLACEMENTS.num_bytes)
    if text is None:
        raise CaseError([replace(problem, remedy=problem.remedy or _REMEDY) for problem in problems])
    content, locate = _parse(text, str(path))
    try:
        return _build(content)
    except CaseError as error:
        raise CaseError(
            [replace(each, file=str(path), line=locate(each.path)) for each in error.problems]
        ) from None


def format_placement(placement: Placement) -> str:
    """Return a placement as the text of a YAML file, with a line for each rank.

    A placement without `layers` is written as one `matrix`.
    """
    lines = [
        "# Which rank holds which experts: a row for each rank.",
        f"num_experts: {placement.num_experts}",
    ]
    if not placement.layers:
        lines += ["matrix:", *_format_rows(placement.matrices[0])]
    else:
        lines.append("layers:")
        for layer, matrix in zip(placement.layers, placement.matrices, strict=True):
            lines += [f"  {layer}:", *(f"  {row}" for row in _format_rows(matrix))]
    return "\n".join(lines) + "\n"


def placement_to_dict(placement: Placement) -> dict[str, Any]:
    """Return the content of a file as plain data, for JSON."""
    rows = [[list(row) for row in matrix] for matrix in placement.matrices]
    head: dict[str, Any] = {"num_experts": placement.num_experts}
    if not placement.layers:
        return {**head, "matrix": rows[0]}
    return {**head, "layers": {str(layer): row for layer, row in zip(placement.layers, rows, strict=True)}}


def _format_rows(matrix: Matrix) -> Iterator[str]:
    return (f"- [{', '.join(map(str, row))}]" for row in matrix)


def _parse(text: str, file: str) -> tuple[Any, Callable[[str], int | None]]:
    """Return the content of a file, and a function from a dotted path to its line.

    Raises: CaseError if it is neither JSON nor YAML, or too large.
    """
    if text.lstrip()[:1] in ("{", "["):
        # A hundred times faster than YAML. Text that is not JSON may still be YAML in flow style.
        with suppress(JSONDecodeError):
            content = parse_json(text)
            return content, lambda path: find_line(text, _read_path(path, content))
    problems: list[Problem] = []
    tree = parse_text(text, file, problems.append, limits=_OF_PLACEMENTS)
    if tree is None or problems:
        raise CaseError([replace(problem, remedy=problem.remedy or _REMEDY) for problem in problems])
    if isinstance(tree.content, list):
        named = Entry({"matrix": tree}, tree.place)
        return tree.plain(), lambda path: named.locate(path.split(".")).line
    return tree.plain(), lambda path: tree.locate(path.split(".")).line


def _read_path(path: str, content: Any) -> list[str | int]:
    """Return the steps of a dotted path, such as `layers.1[3]`; a file with only a matrix has no names."""
    steps = [int(index) if index else name for name, index in _STEP.findall(path)]
    return steps[1:] if isinstance(content, list) else steps


def _build(content: Any) -> Placement:
    if isinstance(content, list):
        content = {"matrix": content}
    if not isinstance(content, dict):
        kind = "nothing" if content is None else "a single value"
        raise CaseError([Problem(f"expected a placement, got {kind}", remedy=_REMEDY)])
    problems = [
        Problem("unknown field", path=str(name), remedy=f"fields are {', '.join(_FIELDS)}")
        for name in content
        if name not in _FIELDS
    ]
    if ("matrix" in content) == ("layers" in content):
        problems.append(Problem("expected either `matrix` or `layers`", remedy=_REMEDY))
        raise CaseError(problems)
    named = {"": content["matrix"]} if "matrix" in content else content["layers"]
    if not isinstance(named, dict) or not named:
        problems.append(Problem("expected a matrix for each MoE layer", path="layers", remedy=_REMEDY))
        raise CaseError(problems)
    layers = list(_read_layers(named, problems)) if "layers" in content else []
    matrices = [
        _read_matrix(matrix, f"layers.{name}" if name != "" else "matrix", problems)
        for name, matrix in named.items()
    ]
    num_experts = content.get("num_experts")
    if num_experts is None:
        # Handwritten files may omit it: every expert is on some rank and so appears in a matrix.
        num_experts = max((e for matrix in matrices for row in matrix for e in row), default=0) + 1
    elif not _is_count(num_experts):
        message = f"expected a number of experts, got {num_experts!r:.60}"
        problems.append(Problem(message, path="num_experts"))
    if problems:
        raise CaseError(problems)
    return Placement(int(num_experts), tuple(matrices), tuple(layers))


def _read_layers(named: dict[Any, Any], problems: list[Problem]) -> Iterator[int]:
    for name in named:
        if re.fullmatch(r"\d{1,6}", str(name)):
            yield int(name)
        else:
            problems.append(
                Problem(
                    "expected the index of an MoE layer", path=f"layers.{name}", remedy="write 0, 1, 2, ..."
                )
            )


def _read_matrix(content: Any, path: str, problems: list[Problem]) -> Matrix:
    """Return a matrix without its invalid rows and experts, which are added to `problems`."""
    if not isinstance(content, list):
        problems.append(Problem("expected a row for each rank", path=path, remedy=_REMEDY))
        return ()
    rows = []
    for rank, row in enumerate(content):
        if not isinstance(row, list):
            message = f"expected the experts of rank {rank}, got {row!r:.60}"
            problems.append(Problem(message, path=f"{path}[{rank}]", remedy="write a list: [0, 3]"))
            continue
        problems += [
            Problem(f"expected an expert, got {each!r:.60}", path=f"{path}[{rank}]", remedy="write integers")
            for each in row
            if not _is_count(each)
        ]
        rows.append(tuple(int(each) for each in row if _is_count(each)))
    return tuple(rows)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value <= MOST_EXPERTS
