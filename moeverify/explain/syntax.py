"""Parts of syntax trees of the user's source files: assignments, calls, conditions and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

from moeverify.explain.program import Site
from moeverify.explain.sites import parse_file

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
RETURNED = "return"
"""Name of the value that a function returns."""
_SIZES = frozenset({"len", "numel", "nelement"})
LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class SourceFile:
    """Syntax tree of a source file, with the parent of each node."""

    def __init__(self, path: str) -> None:
        self.path, self.tree = path, parse_file(path)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def classes(self) -> frozenset[str]:
        """Names of the classes in the file."""
        return frozenset(node.name for node in self.parents if isinstance(node, ast.ClassDef))

    def function_of(self, node: ast.AST) -> Function | None:
        """Return the innermost function around a node."""
        while (found := self.parents.get(node)) is not None:
            if isinstance(found, FUNCTIONS):
                return found
            node = found
        return None

    def statement_line(self, node: ast.AST) -> int:
        """Return the first line of the statement around a node."""
        while not isinstance(node, ast.stmt) and (found := self.parents.get(node)) is not None:
            node = found
        return first_line(node)

    def statement_at(self, line: int) -> ast.stmt | None:
        """Return the innermost statement that begins at a line or runs over it."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.stmt))
        around = [node for node in found if first_line(node) <= line <= (node.end_lineno or 0)]
        return max(around, key=first_line, default=None)

    def list_lines(self, function: Function | None) -> range:
        """Return the lines of a function, or of the file."""
        if function is None:
            return range(1, max((node.end_lineno or 0 for node in self.tree.body), default=0) + 1)
        return range(first_line(function), (function.end_lineno or 0) + 1)

    def find(self, site: Site) -> ast.AST | None:
        """Return the expression of a recorded call."""
        found = (node for node in ast.walk(self.tree) if find_span(node) == site.span)
        return next((node for node in found if not isinstance(node, ast.Expr)), None)


@lru_cache(maxsize=64)
def _list_bodies(path: str) -> list[tuple[int, int, str]]:
    """Return the first and last line of the body of each function of a file, and its name."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = (node for node in ast.walk(parse_file(path)) if isinstance(node, kinds))
    return [(node.body[0].lineno, node.end_lineno or node.lineno, node.name) for node in functions]


def find_function(path: str, line: int) -> tuple[str, int]:
    """Return the file and first line of the innermost function that contains a line; 0 outside of functions."""
    return path, _find_body(path, line)[0]


def name_function(path: str, line: int) -> str:
    """Return the name of the innermost function that contains a line; empty outside of functions."""
    return _find_body(path, line)[2]


def _find_body(path: str, line: int) -> tuple[int, int, str]:
    return max((each for each in _list_bodies(path) if each[0] <= line <= each[1]), default=(0, 0, ""))


def find_span(node: ast.AST) -> tuple[int, int, int, int]:
    """Return the place of a node, as `Site.span`; -1 for a node without one."""
    names = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    first, begin, last, end = (int(getattr(node, name, -1)) for name in names)
    return first, begin, last, end


def first_line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def function_line(function: Function) -> int:
    """Return the line of a function, or of its first decorator."""
    return min(map(first_line, (function, *getattr(function, "decorator_list", ()))))


def list_sized(node: ast.AST) -> set[ast.AST]:
    """Return the parts of an expression that ask for the size of a value, such as `len(x)` and `x.shape[0]`.

    The size of a rank's part is right by itself, and may be the wrong number where it is asked for.
    """
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call) and name_called(each) in _SIZES)
    shapes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr == "shape")
    return {inner for each in (*calls, *shapes) for inner in ast.walk(each)}


def list_loads(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the names, attributes, calls and indexed objects of an expression, outer ones first."""
    called = {each.func for each in ast.walk(node) if isinstance(each, ast.Call)}
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute | ast.Call | ast.Subscript) and each not in called:
            yield each


def is_plain(value: ast.expr) -> bool:
    """Return whether an expression only passes a name on, or is a constant such as an empty list."""
    is_empty = (
        isinstance(value, ast.List | ast.Tuple | ast.Dict) and not list(ast.iter_child_nodes(value))[1:]
    )
    return is_empty or isinstance(value, ast.Constant | ast.Name)


def is_choice(file: SourceFile, value: ast.expr) -> bool:
    """Return whether a name is assigned under a condition, or to an attribute of another object than `self`."""
    parent = file.parents.get(value)
    if not (isinstance(parent, ast.Assign) and isinstance(value, ast.Name)):
        return False
    owners = [each.value for each in parent.targets if isinstance(each, ast.Attribute)]
    is_set = any(not (isinstance(owner, ast.Name) and owner.id == "self") for owner in owners)
    return is_set or isinstance(file.parents.get(parent), ast.If)


def is_augmented(file: SourceFile, value: ast.expr) -> bool:
    """Return whether a statement such as `x += value` takes an expression."""
    return isinstance(file.parents.get(value), ast.AugAssign)


def is_looped(file: SourceFile, value: ast.expr) -> bool:
    """Return whether a loop runs over an expression."""
    return isinstance(parent := file.parents.get(value), ast.For) and parent.iter is value


def list_parameters(function: Function) -> list[str]:
    args = function.args
    return [each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def find_argument(call: ast.Call, name: str, names: Sequence[str]) -> ast.expr | None:
    """Return the argument of a call for a parameter. `names` are the positional parameters."""
    found = next((each.value for each in call.keywords if each.arg == name), None)
    at = names.index(name) if name in names else len(call.args)
    is_plain = not any(isinstance(each, ast.Starred) for each in call.args[: at + 1])
    return found if found is not None or at >= len(call.args) or not is_plain else call.args[at]


def name_called(node: ast.Call | ast.Subscript) -> str:
    """Return the name of the function that an expression calls."""
    if isinstance(node, ast.Subscript):
        return "__getitem__"
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@lru_cache(maxsize=1024)
def walk_own(function: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a function without those of functions inside it."""
    return tuple(_walk_own(function))


def _walk_own(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FUNCTIONS):
            yield child
            yield from _walk_own(child)


@lru_cache(maxsize=1024)
def _list_all_targets(function: ast.AST) -> tuple[tuple[ast.expr, ast.expr], ...]:
    """Return (target, expression) of all assignments and loops of a function. Each name is looked up in turn."""
    return tuple(pair for node in walk_own(function) for pair in list_targets(node))


def list_assigned(function: ast.AST, name: str) -> Iterator[tuple[int, ast.expr]]:
    """Yield (line, expression) of each assignment to a local name."""
    for target, value in _list_all_targets(function):
        if isinstance(target, ast.Name) and target.id == name:
            yield first_line(value), value


def list_stored(function: ast.AST, name: str) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the keys and values that are stored in a local list or dictionary, and whether they are appended."""
    yield from (
        (each, is_appended) for owner, each, is_appended in _list_all_stored(function) if owner == name
    )


@lru_cache(maxsize=1024)
def _list_all_stored(function: ast.AST) -> tuple[tuple[str, ast.expr, bool], ...]:
    """Return (name of a list or dictionary, key or value, whether it is appended) of a function."""
    found: list[tuple[str, ast.expr, bool]] = []
    for node in walk_own(function):
        if isinstance(node, ast.Call):
            found += ((name, each, True) for name in _list_extended(node) for each in node.args)
        for target, value in list_targets(node):
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                found += ((target.value.id, each, False) for each in (target.slice, value))
    return tuple(found)


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def list_append_tests(file: SourceFile, function: Function, name: str) -> Iterator[ast.expr]:
    """Yield the conditions under which a function appends to a local list."""
    for node in walk_own(function):
        if isinstance(node, ast.Call) and name in _list_extended(node):
            owner = getattr(node.func, "value", None)
            if isinstance(owner, ast.IfExp):
                yield owner.test
            yield from list_conditions(file, node)


def _list_extended(node: ast.Call) -> set[str]:
    """Return the names of the lists to which a call appends, or whose members it extends."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("append", "add", "extend"):
        return set()
    return {each.id for each in ast.walk(node.func.value) if isinstance(each, ast.Name)}


def list_targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, expression) of an assignment or loop."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For | ast.comprehension):
        pairs = [(node.target, node.iter)]
    for target, value in pairs:
        if not isinstance(target, ast.Tuple | ast.List):
            yield target, value
        elif isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield from ((each, value) for each in target.elts)


def list_conditions(file: SourceFile, node: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions under which a function executes a node, the innermost first."""
    child = node
    while (parent := file.parents.get(child)) is not None and not isinstance(child, FUNCTIONS):
        if isinstance(parent, ast.If | ast.While | ast.IfExp) and child is not parent.test:
            yield parent.test
        for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if isinstance(body, list) and child in body:
                before = body[: body.index(child)]
                yield from (
                    each.test
                    for each in before
                    if isinstance(each, ast.If) and isinstance(each.body[-1], LEAVES)
                )
        child = parent


_OF_LAYOUT = frozenset(
    {"size", "get_local_rank", "get_rank", "get_world_size", "get_group_size", "get_group_rank"}
)
"""Calls of torch.distributed that return sizes and ranks of meshes and groups."""


@lru_cache(maxsize=4096)
def asks_layout(node: ast.expr) -> bool:
    """Return whether an expression asks a mesh or group for a size or rank."""
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(name_called(each) in _OF_LAYOUT for each in calls)


@lru_cache(maxsize=64)
def map_backward(path: str) -> Mapping[int, tuple[range, ...]]:
    """Return the lines of each `return` of `backward`, by the lines of the `forward` beside it."""
    found: dict[int, tuple[range, ...]] = {}
    for node in ast.walk(parse_file(path)):
        body = node.body if isinstance(node, ast.ClassDef) else ()
        methods = {each.name: each for each in body if isinstance(each, ast.FunctionDef)}
        if {"forward", "backward"} <= methods.keys():
            returns = (each for each in walk_own(methods["backward"]) if isinstance(each, ast.Return))
            found.update(dict.fromkeys(_list_lines(methods["forward"]), tuple(map(_list_lines, returns))))
    return found


def _list_lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def list_names(target: ast.expr) -> Iterator[str]:
    """Yield the names and attributes, such as `self.size`, to which a target assigns."""
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from list_names(each)
    elif isinstance(target, ast.Name | ast.Attribute):
        yield ast.unparse(target)


@lru_cache(maxsize=64)
def map_assignments(path: str) -> Mapping[int, tuple[int, tuple[str, ...]]]:
    """Return the first line and names of the assignment, loop or return that each line of a file is in."""
    found: dict[int, tuple[int, tuple[str, ...]]] = {}
    for node in ast.walk(parse_file(path)):
        targets = [] if isinstance(node, ast.comprehension) else [each for each, _ in list_targets(node)]
        names = tuple(name for target in targets for name in list_names(target))
        names = (RETURNED,) if isinstance(node, ast.Return) else names
        if names:
            last = node.iter.end_lineno if isinstance(node, ast.For) else getattr(node, "end_lineno", None)
            first = first_line(node)
            found.update(dict.fromkeys(range(first, (last or first) + 1), (first, names)))
    return found
