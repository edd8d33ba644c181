"""Definitions of the Python values that a call takes, in the source code: numbers, groups, flags and indices.

The recorded program has tensors alone. Here the names in a call are followed through assignments, parameters,
attributes and results of functions, along the recorded call stack where there is one.
"""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moeverify.explain.program import HIDDEN, Program, Site
from moeverify.explain.sites import is_of_user, parse_file

_MOST_VISITED = 400
_MOST_FOLLOWED = 40
"""Maximum number of expressions through which lists are followed."""
_MOST_FRAMES = 3
"""Maximum number of calling functions whose conditions are followed."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMES, _ALL = (ast.Name, ast.Attribute), (ast.expr,)
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, eq=False)
class _Scope:
    """A function (None: a module) in which names are looked up, and the call that runs it, if known."""

    file: _File
    function: _Function | None
    call: _Call | None = None


@dataclass(frozen=True, eq=False)
class _Call:
    node: ast.Call
    scope: _Scope


@dataclass(frozen=True, eq=False)
class _Use:
    """An expression whose names are to be followed. Assignments after `line` do not count."""

    node: ast.AST
    scope: _Scope
    line: int


class _File:
    """Syntax tree of a source file, with the parent of each node."""

    def __init__(self, path: str) -> None:
        self.path, self.tree = path, parse_file(path)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def function_of(self, node: ast.AST) -> _Function | None:
        """Return the innermost function around a node."""
        while (found := self.parents.get(node)) is not None:
            if isinstance(found, _FUNCTIONS):
                return found
            node = found
        return None

    def find(self, site: Site) -> ast.AST | None:
        """Return the expression of a recorded call."""
        if site.span is None:
            return None
        first, begin, last, end = site.span
        place = (first, last, begin, end)
        found = (node for node in ast.walk(self.tree) if _place(node) == place)
        return next((node for node in found if not isinstance(node, ast.Expr)), None)


class Definitions:
    """Search for definitions in source files.

    `passes` says of (file, line) that its values need no look. Lines of `executed`, which has those of each file
    that was traced, count alone.
    """

    def __init__(
        self,
        files: Iterable[str],
        passes: Callable[[str, int], bool],
        executed: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        self._files = {path: _File(path) for path in files}
        self._passes, self._executed = passes, executed or {}

    def _is_executed(self, file: _File, node: ast.AST) -> bool:
        lines = self._executed.get(file.path)
        last = getattr(node, "end_lineno", None) or _line(node)
        return lines is None or any(line in lines for line in range(_line(node), last + 1))

    def find(
        self,
        sites: Sequence[Site],
        *,
        is_of_tensors: bool = False,
        of_conditions: bool = False,
        keyword: str = "",
    ) -> list[Site]:
        """Return the lines that define the arguments of a call, the nearest first, or else its conditions.

        `sites` is the call stack, the innermost line first. With `is_of_tensors`, the call takes tensors
        alone, and so do the functions that it calls. With `of_conditions`, arguments do not count. With `keyword`,
        only this argument counts, if the call has it.
        """
        uses: list[_Use] = []
        conditions: list[_Use] = []
        scopes = self._list_scopes(sites)
        for depth, (node, scope) in enumerate(scopes):
            if not (uses or of_conditions):
                taken = _find_argument(node, keyword, ()) if isinstance(node, ast.Call) and keyword else None
                uses.append(_Use(taken or node, scope, _line(node)))
            if depth < _MOST_FRAMES:
                conditions += [_Use(test, scope, _line(node)) for test in _list_conditions(scope.file, node)]
        found = dict.fromkeys(
            self._follow(uses, skips_calls=is_of_tensors, plain=_ALL * (keyword == "group"))
        )
        return list(found or dict.fromkeys(self._follow(conditions, plain=_NAMES * of_conditions)))

    def find_conditions(self, sites: Sequence[Site]) -> list[Site]:
        """Return the conditions under which two calls of a stack run, those of the outer one first."""
        scopes = self._list_scopes(sites)[1::-1]
        found = [(scope, test) for node, scope in scopes for test in _list_conditions(scope.file, node)]
        return [_site(scope, test) for scope, test in found]

    def find_members(self, sites: Sequence[Site]) -> list[Site]:
        """Return the conditions under which elements are appended to the lists that the calls of a stack take.

        A condition that calls a function of the user is followed by the values that the function returns.
        """
        scopes = self._list_scopes(sites)[:_MOST_FRAMES]
        return list(dict.fromkeys(self._list_members([_Use(*each, _line(each[0])) for each in scopes])))

    def _list_members(self, uses: Sequence[_Use]) -> Iterator[Site]:
        waiting, seen = deque(uses), set[ast.AST]()
        while waiting and len(seen) < _MOST_FOLLOWED:
            use = waiting.popleft()
            for node in _list_loads(use.node):
                if isinstance(node, ast.Name) and use.scope.function is not None:
                    for test in _list_append_tests(use.scope.file, use.scope.function, node.id):
                        yield _site(use.scope, test)
                        called = [each for each in ast.walk(test) if isinstance(each, ast.Call)]
                        for call in called:
                            found = self._list_returned(call, _Use(test, use.scope, _line(test)))
                            yield from (_site(scope, value) for value, scope, _ in found)
                if isinstance(node, ast.Attribute) and not _is_of_self(node):
                    continue
                for value, scope, _ in self._define(node, use):
                    if value not in seen:
                        seen.add(value)
                        waiting.append(_Use(value, scope, _line(value)))

    def _list_scopes(self, sites: Sequence[Site]) -> list[tuple[ast.AST, _Scope]]:
        """Return the calls of a stack in user code, the innermost first, each with its function."""
        found: list[tuple[ast.AST, _Scope]] = []
        call: _Call | None = None
        for site in reversed(sites):
            file = self._files.get(site.file)
            node = file.find(site) if file is not None else None
            if file is None or node is None:
                call = None
                continue
            scope = _Scope(file, file.function_of(node), call)
            found.append((node, scope))
            call = _Call(node, scope) if isinstance(node, ast.Call) else None
        return found[::-1]

    def _follow(
        self, uses: Sequence[_Use], *, skips_calls: bool = False, plain: tuple[type[ast.expr], ...] = ()
    ) -> Iterator[Site]:
        """Yield the lines that define the values of expressions, breadth first.

        Expressions of the types `plain` have no tensors, also in lines that make tensors.
        """
        waiting = deque(uses)
        seen: set[tuple[ast.expr, _Function | None]] = set()
        while waiting and len(seen) < _MOST_VISITED:
            use = waiting.popleft()
            for node in _list_loads(use.node):
                if skips_calls and use in uses and isinstance(node, ast.Call):
                    continue
                for value, scope, is_shown in self._define(node, use):
                    key = (value, scope.function)
                    is_passed = not isinstance(value, plain) and self._passes(scope.file.path, _line(value))
                    if key in seen or is_passed:
                        continue
                    seen.add(key)
                    is_choice = isinstance(value, plain) and _is_choice(scope.file, value)
                    if is_shown and (is_choice or not _is_plain(value)):
                        yield _site(scope, value)
                    waiting.append(_Use(value, scope, _line(value)))

    def _define(self, node: ast.expr, use: _Use) -> Iterator[tuple[ast.expr, _Scope, bool]]:
        """Yield (expression, its scope, whether to show it) for each definition of a name, attribute or call."""
        if isinstance(node, ast.Call) and _name_called(node) == "getattr":
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant):
                found = self._attributes.get(str(name.value), ())
                yield from ((value, scope, True) for value, scope, _ in found)
        elif isinstance(node, ast.Call):
            yield from self._list_returned(node, use)
        elif isinstance(node, ast.Attribute):
            yield from self._list_attribute(node, use.scope)
        elif isinstance(node, ast.Name):
            yield from self._list_name(node.id, use.scope, use.line)

    def _list_name(self, name: str, scope: _Scope, line: int) -> Iterator[tuple[ast.expr, _Scope, bool]]:
        function = scope.function
        if function is None:
            return
        assigned = [
            (at, value)
            for at, value in _list_assigned(function, name)
            if at < line and self._is_executed(scope.file, value)
        ]
        if assigned:
            last = max(at for at, _ in assigned)
            yield from (
                (value, scope, not _is_looped(scope.file, value)) for at, value in assigned if at == last
            )
            yield from ((value, scope, True) for value in _list_stored(function, name))
        elif name in _parameters(function):
            yield from self._list_arguments(name, function, scope)
        else:
            outer = scope.file.function_of(function)
            if outer is not None:
                yield from self._list_name(name, _Scope(scope.file, outer), _line(function) + 1)

    def _list_arguments(
        self, name: str, function: _Function, scope: _Scope
    ) -> Iterator[tuple[ast.expr, _Scope, bool]]:
        """Yield the arguments for a parameter in the known call of a function, or else in all calls by its name."""
        if isinstance(function, ast.Lambda):
            return
        owner, names = _class_of(_Scope(scope.file, function)), _parameters(function)
        for call in self._list_calls(function, owner) if scope.call is None else [scope.call]:
            is_bound = owner is not None and names[:1] in (["self"], ["cls"], ["ctx"])
            value = _find_argument(call.node, name, names[is_bound:])
            if value is not None:
                yield value, call.scope, isinstance(value, ast.Attribute) or scope.call is None

    def _list_calls(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None
    ) -> list[_Call]:
        """Return the calls of a function of a class, if any, by its name."""
        if owner is not None and function.name == "__init__":
            return self._calls.get(owner.name, [])
        if owner is not None and function.name == "forward" and _parameters(function)[:1] == ["ctx"]:
            applied = self._calls.get("apply", ())  # of an autograd function
            name = [owner.name, "apply"]
            return [each for each in applied if ast.unparse(each.node.func).split(".")[-2:] == name]
        return self._calls.get(function.name, [])

    def _list_attribute(self, node: ast.Attribute, scope: _Scope) -> Iterator[tuple[ast.expr, _Scope, bool]]:
        """Yield the values assigned to an attribute, those of its class if that is known."""
        found = [
            each for each in self._attributes.get(node.attr, ()) if self._is_executed(each[1].file, each[0])
        ]
        own = _name_class(node.value, scope)
        inside = [each for each in found if own and each[2] == own]
        is_all = all(isinstance(value, ast.Constant) for value, _, _ in inside)
        yield from ((value, at, True) for value, at, _ in (found if is_all else inside))

    def _list_returned(self, node: ast.Call, use: _Use) -> Iterator[tuple[ast.expr, _Scope, bool]]:
        """Yield the values that a function of the user returns."""
        name = _name_called(node)
        functions = self._functions.get(name, [])
        for file, function in functions if len(functions) == 1 else ():
            scope = _Scope(file, function, _Call(node, use.scope))
            for each in _walk_own(function):
                if isinstance(each, ast.Return) and each.value is not None and self._is_executed(file, each):
                    yield each.value, scope, True

    @cached_property
    def _functions(self) -> dict[str, list[tuple[_File, ast.FunctionDef | ast.AsyncFunctionDef]]]:
        found = defaultdict(list)
        for file in self._files.values():
            for node in ast.walk(file.tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[node.name].append((file, node))
        return found

    @cached_property
    def _calls(self) -> dict[str, list[_Call]]:
        found = defaultdict(list)
        for file in self._files.values():
            for node in ast.walk(file.tree):
                if isinstance(node, ast.Call):
                    found[_name_called(node)].append(_Call(node, _Scope(file, file.function_of(node))))
        return found

    @cached_property
    def _attributes(self) -> dict[str, list[tuple[ast.expr, _Scope, str]]]:
        """Values that are assigned to attributes or passed as fields of classes, by name, with the class if known."""
        found = defaultdict(list)
        for file in self._files.values():
            for node in ast.walk(file.tree):
                for target, value in _list_targets(node):
                    if isinstance(target, ast.Attribute):
                        scope = _Scope(file, file.function_of(node))
                        found[target.attr].append((value, scope, _name_class(target.value, scope)))
                if isinstance(node, ast.ClassDef):
                    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                    names = [each.id for each in fields if isinstance(each, ast.Name)]
                    for call in self._calls.get(node.name, ()):
                        given = {each.arg for each in call.node.keywords if each.arg is not None}
                        for name in (*names, *sorted(given.difference(names))):
                            if (passed := _find_argument(call.node, name, names)) is not None:
                                found[name].append((passed, call.scope, node.name))
        return found


def _place(node: ast.AST) -> tuple[object, ...]:
    names = ("lineno", "end_lineno", "col_offset", "end_col_offset")
    return tuple(getattr(node, name, None) for name in names)


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _site(scope: _Scope, node: ast.expr) -> Site:
    """Return the statement's line of an expression, with the expression as its span."""
    name = getattr(scope.function, "name", "<lambda>") if scope.function is not None else "<module>"
    span = (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0)
    return Site(scope.file.path, node.lineno, name, 0, span)


def _list_loads(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the names, attributes and calls of an expression, outer ones first."""
    called = {each.func for each in ast.walk(node) if isinstance(each, ast.Call)}
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute | ast.Call) and each not in called:
            yield each


def _is_plain(value: ast.expr) -> bool:
    """Return whether an expression only passes a name on, or is a constant such as an empty list."""
    is_empty = (
        isinstance(value, ast.List | ast.Tuple | ast.Dict) and not list(ast.iter_child_nodes(value))[1:]
    )
    return is_empty or isinstance(value, ast.Constant | ast.Name)


def _is_choice(file: _File, value: ast.expr) -> bool:
    """Return whether a name is assigned under a condition, or to an attribute of another object than `self`."""
    parent = file.parents.get(value)
    if not (isinstance(parent, ast.Assign) and isinstance(value, ast.Name)):
        return False
    owners = [each.value for each in parent.targets if isinstance(each, ast.Attribute)]
    is_set = any(not (isinstance(owner, ast.Name) and owner.id == "self") for owner in owners)
    return is_set or isinstance(file.parents.get(parent), ast.If)


def _is_looped(file: _File, value: ast.expr) -> bool:
    """Return whether a loop runs over an expression."""
    return isinstance(parent := file.parents.get(value), ast.For) and parent.iter is value


def _class_of(scope: _Scope) -> ast.ClassDef | None:
    parent = scope.file.parents.get(scope.function) if scope.function is not None else None
    return parent if isinstance(parent, ast.ClassDef) else None


def _name_class(owner: ast.expr, scope: _Scope) -> str:
    """Return the class of the object `owner`: that of `self` or `ctx`, or of an annotated parameter; else empty."""
    name, own = getattr(owner, "id", ""), _class_of(scope)
    if name in ("self", "ctx"):
        return own.name if own is not None else ""
    args = ast.walk(scope.function.args) if scope.function is not None else ()
    found = (each.annotation for each in args if isinstance(each, ast.arg) and each.arg == name)
    return str(getattr(next(found, None), "id", ""))


def _parameters(function: _Function) -> list[str]:
    args = function.args
    return [each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def _find_argument(call: ast.Call, name: str, names: Sequence[str]) -> ast.expr | None:
    """Return the argument of a call for a parameter. `names` are the positional parameters."""
    found = next((each.value for each in call.keywords if each.arg == name), None)
    at = names.index(name) if name in names else len(call.args)
    is_plain = not any(isinstance(each, ast.Starred) for each in call.args[: at + 1])
    return found if found is not None or at >= len(call.args) or not is_plain else call.args[at]


def _name_called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _walk_own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _walk_own(child)


def _list_assigned(function: _Function, name: str) -> Iterator[tuple[int, ast.expr]]:
    """Yield (line, expression) of each assignment to a local name."""
    for node in _walk_own(function):
        for target, value in _list_targets(node):
            if isinstance(target, ast.Name) and target.id == name:
                yield _line(value), value


def _list_stored(function: _Function, name: str) -> Iterator[ast.expr]:
    """Yield the keys and values that are stored in a local list or dictionary."""
    for node in _walk_own(function):
        for target, value in _list_targets(node):
            if not (isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)):
                continue
            if target.value.id == name:
                yield from (target.slice, value)


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _list_append_tests(file: _File, function: _Function, name: str) -> Iterator[ast.expr]:
    """Yield the conditions under which a function appends to a local list."""
    for node in _walk_own(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        names = {each.id for each in ast.walk(owner) if isinstance(each, ast.Name)}
        if name in names and node.func.attr in ("append", "add", "extend"):
            if isinstance(owner, ast.IfExp):
                yield owner.test
            yield from _list_conditions(file, node)


def _list_targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
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


def _list_conditions(file: _File, node: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions under which a function executes a node, the innermost first."""
    child = node
    while (parent := file.parents.get(child)) is not None and not isinstance(child, _FUNCTIONS):
        if isinstance(parent, ast.If | ast.While | ast.IfExp) and child is not parent.test:
            yield parent.test
        for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if isinstance(body, list) and child in body:
                before = body[: body.index(child)]
                yield from (
                    each.test
                    for each in before
                    if isinstance(each, ast.If) and isinstance(each.body[-1], _LEAVES)
                )
        child = parent


def make_definitions(programs: Sequence[Program]) -> Definitions:
    """Return the definitions in the user's files that the recorded programs name."""
    files: set[str] = set()
    made: set[tuple[str, int]] = set()
    read: set[tuple[str, int]] = set()
    for program in programs:
        for op in program.ops:
            users = [site for site in op.sites if is_of_user(site.file)]
            files.update(site.file for site in users)
            if users and op.short not in HIDDEN:
                (made if op.scalar is None else read).add((users[0].file, users[0].line))
            if op.step >= 0 and any(program.values[number].is_floating for number in op.results):
                made.update((site.file, site.line) for site in users)
        calls = [each[0] for each in program.groups.values()] + program.optimizers
        files.update(site.file for sites in calls for site in sites)
    executed = defaultdict(set)
    for program in programs:
        for file, line in itertools.chain(*program.lines.values()):
            executed[file].add(line)
    # A line that makes tensors is in the recorded program, if it does not read a number of one.
    return Definitions(filter(is_of_user, files), lambda *line: line in made and line not in read, executed)
