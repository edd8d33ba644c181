"""Mutants: the parallel code with one rewritten node of its syntax tree, listed without running anything."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from moeverify.cases.schema import Precision
from moeverify.errors import CaseError, Problem
from moeverify.faults.mutation.coverage import is_inside, list_spans_of_file
from moeverify.faults.mutation.operators import OPERATORS
from moeverify.faults.mutation.operators.tensors import NARROW
from moeverify.faults.mutation.sites import AREAS, Area, find_area
from moeverify.results.mutation import Span

PREFIX = "mutant:"
"""Prefix of a `--fault` target that names a mutant."""

ROOT = Path(__file__).parents[2]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One rewritten node.

    - `file`: the path below the package.
    - `function`: the qualified name of the function that contains the node.
    - `span`: the span of the node; for a compound statement, of its condition.
    - `before`, `after`: the source of the node.
    - `node`, `replacement`: the old and the new node. `tree` is the unchanged syntax tree of the file.
    """

    file: str
    function: str
    operator: str
    ordinal: int
    span: Span
    before: str
    after: str
    area: Area
    tree: ast.Module = field(repr=False, compare=False)
    node: ast.AST = field(repr=False, compare=False)
    replacement: ast.AST = field(repr=False, compare=False)

    @property
    def line(self) -> int:
        """Return the first line of the node."""
        return self.span[0]

    @property
    def module(self) -> str:
        """Return the name of the module within the package."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def name(self) -> str:
        """Return the name of the mutant, which edits of other functions do not change."""
        return f"{self.module}:{self.function}:{self.operator}:{self.ordinal}"

    @cached_property
    def function_lines(self) -> tuple[int, int]:
        """Return the first and last line of the innermost function around the node."""
        around = [
            each
            for each in ast.walk(self.tree)
            if isinstance(each, _Function) and each.lineno <= self.line <= (each.end_lineno or each.lineno)
        ]
        innermost = max(around, key=lambda each: each.lineno)
        return innermost.lineno, innermost.end_lineno or innermost.lineno

    @property
    def target(self) -> str:
        """Return the `--fault` argument that injects this mutant."""
        return PREFIX + self.name

    def is_executed(self, executed: Collection[Span]) -> bool:
        """Return whether any instruction of the node was executed.

        A constant that the compiler folds into another one has no instruction. Then the lines of the node
        decide.
        """
        if self._instructions:
            return not self._instructions.isdisjoint(executed)
        return any(self.span[0] <= each[0] <= self.span[2] for each in executed)

    @cached_property
    def _instructions(self) -> frozenset[Span]:
        """Return the spans of the instructions of the node."""
        return frozenset(each for each in list_spans_of_file(ROOT / self.file) if is_inside(each, self.span))

    def is_bug_in(self, precision: Precision) -> bool:
        """Return whether the mutant is a bug at this precision. Rounding to the recipe's own dtype is not."""
        if self.operator != NARROW:
            return True
        to_bfloat16 = self.after.count("bfloat16") > self.before.count("bfloat16")
        return precision == "float64" or (to_bfloat16 and precision == "float32")


def choose_mutants(mutants: Sequence[Mutant], num: int, seed: int) -> list[Mutant]:
    """Return `num` mutants by a seed. Operators alternate, and so do the files of each operator."""
    queues: dict[str, list[Mutant]] = {}
    for operator in OPERATORS:
        by_file: dict[str, list[Mutant]] = {}
        found = [mutant for mutant in mutants if mutant.operator == operator]
        for mutant in sorted(found, key=lambda each: _draw(seed, each.name)):
            by_file.setdefault(mutant.file, []).append(mutant)
        queues[operator] = list(_take_turns(list(by_file.values())))
    return list(_take_turns(list(queues.values())))[:num]


def _take_turns(queues: Sequence[Sequence[Mutant]]) -> Iterator[Mutant]:
    for turn in range(max(map(len, queues), default=0)):
        yield from (queue[turn] for queue in queues if turn < len(queue))


def _draw(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} order {name}".encode()).digest()[:8], "big")


def list_mutants() -> list[Mutant]:
    """Return all mutants of the parallel code, in the order of files and lines."""
    files = dict.fromkeys(path for area in AREAS for path in sorted(ROOT.glob(area.file)))
    return [mutant for path in files for mutant in _list_of_file(str(path.relative_to(ROOT)))]


def find_mutant(name: str) -> Mutant:
    """Return the mutant of a name, with or without `PREFIX`.

    Raises: CaseError when there is none.
    """
    name = name.removeprefix(PREFIX)
    path = name.partition(":")[0].replace(".", "/")
    files = [file for file in (f"{path}.py", f"{path}/__init__.py") if (ROOT / file).is_file()]
    mutant = next((each for file in files for each in _list_of_file(file) if each.name == name), None)
    if mutant is None:
        remedy = "`moeverify faults mutate --list` shows all; their names change with the function that they are in"
        raise CaseError([Problem(f"no mutant `{name}`", remedy=remedy)])
    return mutant


@cache
def _list_of_file(file: str) -> tuple[Mutant, ...]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    ordinals: dict[tuple[str, str], int] = {}
    found: list[Mutant] = []
    for function, node in _list_nodes(tree):
        area = find_area(file, function)
        if area is None:
            continue
        for operator, rewrite in OPERATORS.items():
            for replacement in rewrite(node):
                key = (function, operator)
                ordinal = ordinals[key] = ordinals.get(key, -1) + 1
                found.append(_make(file, function, operator, ordinal, area, tree, node, replacement))
    return tuple(mutant for mutant in found if mutant.before != mutant.after)


def _make(
    file: str,
    function: str,
    operator: str,
    ordinal: int,
    area: Area,
    tree: ast.Module,
    node: ast.AST,
    replacement: ast.AST,
) -> Mutant:
    shown = ast.fix_missing_locations(replacement)
    return Mutant(
        file,
        function,
        operator,
        ordinal,
        _find_span(node),
        _show(node),
        _show(shown),
        area,
        tree,
        node,
        replacement,
    )


def _find_span(node: ast.AST) -> Span:
    """Return the span of a node: for an if its condition, for a loop or comprehension its iterable."""
    if isinstance(node, ast.If):
        node = node.test
    elif isinstance(node, ast.For | ast.comprehension):
        node = node.iter
    line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    return (
        line,
        column,
        getattr(node, "end_lineno", None) or line,
        getattr(node, "end_col_offset", None) or column,
    )


def _show(node: ast.AST) -> str:
    """Return the source of a node on one line; the header of a compound statement."""
    text = " ".join(ast.unparse(node).split("\n")[0].split())
    if isinstance(node, ast.If) and isinstance(node.test, ast.Constant):
        return " ; ".join(ast.unparse(each) for each in node.body)
    return text


def _list_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified function name, node) of all code that runs when functions are called."""
    yield from _visit(tree, "", inside=False)


def _visit(node: ast.AST, function: str, *, inside: bool) -> Iterator[tuple[str, ast.AST]]:
    for child in _list_children(node):
        if isinstance(child, _Function) and _is_rule(child):
            continue
        if isinstance(child, _Function):
            name = f"{function}.{child.name}" if function else child.name
            yield from _visit(child, name, inside=True)
        elif isinstance(child, ast.ClassDef):
            name = f"{function}.{child.name}" if function else child.name
            yield from _visit(child, name, inside=False)
        elif isinstance(child, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            continue
        else:
            if inside and not isinstance(getattr(child, "ctx", None), ast.Store | ast.Del):
                yield function, child
            yield from _visit(child, function, inside=inside)


def _is_rule(function: _Function) -> bool:
    """Return whether a function defines valid cases (`@reading(...)`), which no rank evaluates."""
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func) == "reading" for each in function.decorator_list
    )


def _list_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the executed children of a node, without decorators, defaults, annotations and docstrings."""
    if isinstance(node, _Function | ast.ClassDef):
        body = node.body
        if ast.get_docstring(node) is not None:
            body = body[1:]
        yield from body
    elif isinstance(node, ast.AnnAssign):
        yield from [] if node.value is None else [node.value]
    else:
        yield from ast.iter_child_nodes(node)
