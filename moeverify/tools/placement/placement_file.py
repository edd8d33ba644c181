"""Placements in YAML or JSON files: one matrix for all MoE layers, or one for each.

    num_experts: 4
    layers:
      1: [[0, 3], [1, 2], [1, 2], [0, 3]]
      2: [[0, 1], [1, 2], [2, 3], [3, 0]]

`matrix:` instead of `layers:` applies to every MoE layer. A file may also contain only the matrix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moeverify.errors import CaseError, Problem
from moeverify.input_file import read_input
from moeverify.tools.placement.placement import Matrix, Placement

FILE_ENDINGS = (".yaml", ".yml", ".json")

_FIELDS = ("num_experts", "matrix", "layers")
_REMEDY = (
    "write `matrix: [[0, 3], [1, 2]]`, a row for each rank, or `layers:` with a matrix for each MoE layer"
)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def read_placement(path: Path) -> Placement:
    """Return the placement in a file.

    Raises: CaseError with all problems, each with its line.
    """
    try:
        text = read_input(path).decode("utf-8")
    except FileNotFoundError:
        raise CaseError([Problem("there is no such file", str(path), remedy=_REMEDY)]) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CaseError([Problem(f"this file cannot be read: {reason}", str(path))]) from None
    except UnicodeDecodeError:
        raise CaseError(
            [Problem("this file is not UTF-8 text", str(path), remedy="save it as UTF-8")]
        ) from None
    content = _parse(text, path)
    try:
        return _build(content)
    except CaseError as error:
        document = content if hasattr(content, "lc") else _parse_yaml(text, path)
        raise CaseError([_locate(problem, document, str(path)) for problem in error.problems]) from None


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


def _parse(text: str, path: Path) -> Any:
    if text.lstrip()[:1] in ("{", "["):
        try:
            # A hundred times faster than YAML. Text that is not JSON may still be YAML in flow style.
            return json.loads(text, object_pairs_hook=_reject_twice)
        except (ValueError, RecursionError):
            pass
    return _parse_yaml(text, path)


def _reject_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of JSON pairs; raise ValueError for a duplicate key, which would hide a value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is there twice")
    return content


def _parse_yaml(text: str, path: Path) -> Any:
    """Return the content of YAML text, with line numbers at its lists and mappings."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        message = f"this is not valid YAML: {error.problem or error.context}"
        raise CaseError([Problem(message, str(path), line, remedy=_REMEDY)]) from None
    except YAMLError as error:
        raise CaseError([Problem(f"this is not valid YAML: {error}", str(path), remedy=_REMEDY)]) from None


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
    elif not _is_count(num_experts) or num_experts < 1:
        problems.append(Problem(f"expected a number of experts, got {num_experts!r}", path="num_experts"))
    if problems:
        raise CaseError(problems)
    return Placement(int(num_experts), tuple(matrices), tuple(layers))


def _read_layers(named: dict[Any, Any], problems: list[Problem]) -> Iterator[int]:
    for name in named:
        if str(name).isdecimal():
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
            message = f"expected the experts of rank {rank}, got {row!r}"
            problems.append(Problem(message, path=f"{path}[{rank}]", remedy="write a list: [0, 3]"))
            continue
        problems += [
            Problem(f"expected an expert, got {each!r}", path=f"{path}[{rank}]", remedy="write whole numbers")
            for each in row
            if not _is_count(each)
        ]
        rows.append(tuple(int(each) for each in row if _is_count(each)))
    return tuple(rows)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _locate(problem: Problem, document: Any, file: str) -> Problem:
    """Return a problem with its file, and the line of its path."""
    line: int | None = None
    content = document
    if isinstance(document, list) and problem.path.startswith("matrix"):
        content = {"matrix": document}  # the short form: only a matrix
        line = 1
    for name, index in _STEP.findall(problem.path):
        try:
            key = int(index) if index else _find_key(content, name)
            place = getattr(content, "lc", None)
            if place is not None:
                line = (place.item(key) if index else place.key(key))[0] + 1
            content = content[key]
        except (KeyError, IndexError, TypeError):
            break
    return Problem(problem.message, file, line, problem.path, problem.remedy)


def _find_key(content: Any, name: str) -> Any:
    """Return the key that a path calls `name`; layers may be numbers."""
    return next(key for key in [*content, name] if str(key) == name)
