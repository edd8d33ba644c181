"""Definitions of the Python values that a call takes, in the source code: numbers, groups, flags and indices.

The recorded program has tensors alone. Here the names in a call are followed through assignments, parameters,
attributes and results of functions, along the recorded call stack where there is one.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moeverify.explain.evidence import DefiningLine, find_evidence
from moeverify.explain.program import Site
from moeverify.explain.python_values import Difference, Name, PythonValues
from moeverify.explain.scopes import SourceCall, SourceScope
from moeverify.explain.syntax import (
    RETURNED,
    Function,
    SourceFile,
    asks_layout,
    find_argument,
    first_line,
    function_line,
    is_augmented,
    is_choice,
    is_looped,
    is_of_self,
    is_plain,
    list_append_tests,
    list_assigned,
    list_conditions,
    list_loads,
    list_parameters,
    list_sized,
    list_stored,
    list_targets,
    name_called,
    walk_own,
)

_MOST_VISITED = 400
_MOST_FOLLOWED = 40
"""Maximum number of expressions through which lists are followed."""
_MOST_FRAMES = 3
"""Maximum number of calling functions whose conditions are followed."""
_NAMES, _ALL = (ast.Name, ast.Attribute), (ast.expr,)


@dataclass(frozen=True, eq=False)
class _Use:
    """An expression whose names are to be followed. Assignments after `line` do not count."""

    node: ast.AST
    scope: SourceScope
    line: int


class _Assigned(NamedTuple):
    """A value of an attribute, with the class that owns it and the target of the assignment, if known."""

    value: ast.expr
    scope: SourceScope
    owner: str
    target: str = ""


@dataclass(frozen=True, eq=False)
class _Definition:
    """An expression that defines a value, or a member of it, and the name under which the value is recorded."""

    value: ast.expr
    scope: SourceScope
    is_shown: bool = True
    name: Name | None = None
    is_member: bool = False


class Definitions:
    """Search for definitions in source files.

    `passes` says of (file, line) that its values need no look. Lines of `executed`, which has those of each file
    that was traced, count alone. With `has_modules`, assignments outside of functions count, too.
    """

    def __init__(
        self,
        files: Iterable[str],
        passes: Callable[[str, int], bool],
        executed: Mapping[str, Collection[int]] | None = None,
        values: PythonValues | None = None,
        *,
        has_modules: bool = False,
    ) -> None:
        self._files = {path: SourceFile(path) for path in files}
        self._has_modules = has_modules
        self._passes, self._executed, self._values = passes, executed or {}, values

    def _is_executed(self, file: SourceFile, node: ast.AST) -> bool:
        lines = self._executed.get(file.path)
        last = getattr(node, "end_lineno", None) or first_line(node)
        return lines is None or any(line in lines for line in range(first_line(node), last + 1))

    def find(
        self,
        sites: Sequence[Site],
        *,
        is_of_tensors: bool = False,
        of_conditions: bool = False,
        keyword: str = "",
        has_objects: bool = False,
    ) -> dict[Site, Difference | None]:
        """Return the lines that define the arguments of a call, the nearest first, or else its conditions.

        Each has the difference between the values of ranks and one device, if they were recorded.
        `sites` is the call stack, the innermost line first. With `is_of_tensors`, the call takes tensors
        alone, and so do the functions that it calls. With `of_conditions`, arguments do not count. With `keyword`,
        only this argument counts, if the call has it. With `has_objects`, lines that make modules count, too.
        """
        uses: list[_Use] = []
        conditions: list[_Use] = []
        scopes = self._list_scopes(sites)
        for depth, (node, scope) in enumerate(scopes):
            if not (uses or of_conditions):
                taken = find_argument(node, keyword, ()) if isinstance(node, ast.Call) and keyword else None
                uses.append(_Use(taken or node, scope, first_line(node)))
            if depth < _MOST_FRAMES:
                conditions += [
                    _Use(test, scope, first_line(node)) for test in list_conditions(scope.file, node)
                ]
        is_group = keyword == "group"  # one device has none
        found = self._follow(
            uses,
            skips_calls=is_of_tensors,
            plain=_ALL * is_group,
            compares=not is_group,
            has_objects=has_objects or is_group,
        )
        if of_conditions:  # any other value decides otherwise
            others = self._walk(conditions, False, _NAMES, self._values, has_objects=has_objects)
            found = {each.site: each.difference for each in others if each.difference is not None}
        return found or self._follow(conditions, plain=_NAMES * of_conditions, has_objects=has_objects)

    def find_differences(self, file: str, line: int) -> dict[Site, Difference]:
        """Return the lines that define other values than on one device, for a statement and its conditions.

        Lines of ranks alone come first. Lines are left out whose values others explain or only pass on.
        """
        found = self._walk(self._list_uses(file, line), False, _ALL, self._values)
        found = [each for each in found if each.is_evidence]
        found = [each for each in found if not each.is_passed] or found
        found = [each for each in found if not each.passes] or found
        found.sort(key=lambda each: not each.is_new)
        return {each.site: each.difference for each in found if each.difference is not None}

    def list_called(self, file: str, line: int, *, is_direct: bool = False) -> set[tuple[str, int]]:
        """Return (file, first line of the body) of functions that a statement calls, or also its values call."""
        uses = self._list_uses(file, line)
        sites = () if is_direct else (each.site for each in self._walk(uses, False, _ALL, None))
        waiting = [each.node for each in uses] + [self._files[site.file].find(site) for site in sites]
        found = set[tuple[str, int]]()
        while waiting:
            node = waiting.pop()
            calls = [] if node is None else [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            for source, function in (
                each for call in calls for each in self._functions.get(name_called(call), ())
            ):
                place = source.path, first_line(function.body[0])
                if place not in found and not is_direct:
                    waiting.append(function)
                found.add(place)
        return found

    def _list_uses(self, file: str, line: int) -> list[_Use]:
        """Return the expressions of the statement at a line, and its conditions."""
        source = self._files.get(file)
        node = None if source is None else source.statement_at(line)
        if source is None or node is None:
            return []
        scope = SourceScope(source, source.function_of(node))
        parts = [node.iter] if isinstance(node, ast.For) else [node]
        return [_Use(each, scope, first_line(node)) for each in (*parts, *list_conditions(source, node))]

    def find_conditions(self, sites: Sequence[Site]) -> list[Site]:
        """Return the conditions under which two calls of a stack run, those of the outer one first."""
        scopes = self._list_scopes(sites)[1::-1]
        return [scope.site(test) for node, scope in scopes for test in list_conditions(scope.file, node)]

    def find_members(self, sites: Sequence[Site]) -> list[Site]:
        """Return the conditions under which elements are in the lists that the calls of a stack take.

        A condition that calls a function of the user is followed by the values that the function returns.
        """
        scopes = self._list_scopes(sites)[:_MOST_FRAMES]
        return list(dict.fromkeys(self._list_members([_Use(*each, first_line(each[0])) for each in scopes])))

    def _list_members(self, uses: Sequence[_Use]) -> Iterator[Site]:
        waiting, later, seen = deque[_Use](), deque(uses), set[ast.AST]()
        while (waiting or later) and len(seen) < _MOST_FOLLOWED:
            # The names of the innermost call come first.
            use = waiting.popleft() if waiting else later.popleft()
            for node in list_loads(use.node):
                if isinstance(node, ast.Name) and use.scope.function is not None:
                    for test in list_append_tests(use.scope.file, use.scope.function, node.id):
                        yield use.scope.site(test)
                        called = [each for each in ast.walk(test) if isinstance(each, ast.Call)]
                        for call in called:
                            found = self._list_returned(call, _Use(test, use.scope, first_line(test)))
                            yield from (each.scope.site(each.value) for each in found)
                if isinstance(node, ast.Attribute) and not is_of_self(node):
                    continue
                for each in self._define(node, use):
                    tests = [test for made in getattr(each.value, "generators", ()) for test in made.ifs]
                    yield from (each.scope.site(test) for test in tests)
                    if each.value not in seen:
                        seen.add(each.value)
                        waiting.append(_Use(each.value, each.scope, first_line(each.value)))

    def _list_scopes(self, sites: Sequence[Site]) -> list[tuple[ast.AST, SourceScope]]:
        """Return the calls of a stack in user code, the innermost first, each with its function."""
        found: list[tuple[ast.AST, SourceScope]] = []
        call: SourceCall | None = None
        for site in reversed(sites):
            file = self._files.get(site.file)
            node = file.find(site) if file is not None else None
            if file is None or node is None:
                call = None
                continue
            scope = SourceScope(file, file.function_of(node), call)
            found.append((node, scope))
            call = SourceCall(node, scope) if isinstance(node, ast.Call) else None
        return found[::-1]

    def _follow(
        self,
        uses: Sequence[_Use],
        *,
        skips_calls: bool = False,
        plain: tuple[type[ast.expr], ...] = (),
        compares: bool = True,
        has_objects: bool,
    ) -> dict[Site, Difference | None]:
        """Return the lines that define the values of expressions, with differences from one device.

        Lines of ranks alone come first, then those that define another value from known ones, then others, breadth
        first. If there are differences, lines that define equal values are left out. Expressions of the types `plain`
        have no tensors, also in lines that make tensors.
        """
        values = self._values if compares else None
        found = self._walk(uses, skips_calls, plain, values, has_objects=has_objects)
        if not any(each.is_evidence for each in found):
            # Numbers and keys in lines that make tensors decide which tensor it is.
            chosen = self._walk(uses, skips_calls, _ALL, values) if values is not None else []
            found = [each for each in chosen if each.is_new]
            found += self._walk(uses, skips_calls, plain, None, has_objects=has_objects)
        found.sort(key=lambda each: (not each.is_evidence, each.is_passed, not each.is_new, each.passes))
        return {each.site: each.difference for each in found}

    def _walk(
        self,
        uses: Sequence[_Use],
        skips_calls: bool,
        plain: tuple[type[ast.expr], ...],
        values: PythonValues | None,
        *,
        has_objects: bool = True,
    ) -> list[DefiningLine]:
        """Return definitions of expressions. Those of values that equal one device's are not followed.

        Without `has_objects`, leave out lines that make objects, whose attributes are followed.
        """
        waiting: deque[tuple[_Use, DefiningLine | None]] = deque((use, None) for use in uses)
        seen: dict[tuple[ast.expr, Function | None], DefiningLine | None] = {}
        found: list[DefiningLine] = []
        while waiting and len(seen) < _MOST_VISITED:
            use, user = waiting.popleft()
            skipped = ast.Call if skips_calls and use in uses else ()
            sized = list_sized(use.node) if user is not None and values is not None else set()
            nodes = [
                each for each in list_loads(use.node) if not isinstance(each, skipped) and each not in sized
            ]
            for each in (definition for node in nodes for definition in self._define(node, use)):
                key, line = (each.value, each.scope.function), first_line(each.value)
                is_plain_value = isinstance(each.value, plain) or self._is_number(each)
                is_right = not is_plain_value and self._passes(each.scope.file.path, line)
                # None defines no number.
                is_none = isinstance(each.value, ast.Constant) and each.value.value is None
                if is_right or is_none or (each.is_member and values is None):
                    continue
                is_equal = values is not None and each.name is not None and values.is_equal(each.name)
                if user is not None:
                    user.has_known |= is_equal
                if key in seen or is_equal:
                    if user is not None and (same := seen.get(key)) is not None:
                        same.users.append(user)
                    continue
                passes, asked = isinstance(each.value, _NAMES), asks_layout(each.value)
                users, site = [] if user is None else [user], each.scope.site(each.value)
                made = DefiningLine(site, self._compare(each, values), passes, asked, users)
                seen[key] = made if made.difference is not None else None
                is_chosen = isinstance(each.value, plain) and is_choice(each.scope.file, each.value)
                is_shown = each.is_shown and (has_objects or not self._is_object(each))
                if made.difference or (is_shown and (is_chosen or not is_plain(each.value))):
                    found.append(made)
                waiting.append((_Use(each.value, each.scope, line), made if made.difference else user))
        find_evidence([each for each in seen.values() if each is not None])
        return found

    def _is_number(self, each: _Definition) -> bool:
        """Return whether a number is passed or returned, also on a line that makes tensors."""
        if self._values is None or each.name is None:
            return False
        return self._values.is_number(each.name)

    def _is_object(self, definition: _Definition) -> bool:
        """Return whether a definition makes a module or another object of the user's classes."""
        name, value = definition.name, definition.value
        made = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        called = [name_called(each) if isinstance(each, ast.Call) else "" for each in made]
        is_made = all(any(each in file.classes for file in self._files.values()) for each in called)
        return is_made or (self._values is not None and name is not None and self._values.is_object(name))

    def _compare(self, definition: _Definition, values: PythonValues | None) -> Difference | None:
        """Return how a value differs from one device; None for functions that only the ranks run."""
        function = definition.scope.function
        if values is None or definition.name is None or (function is None and not self._has_modules):
            return None
        file, line, _ = definition.name
        lines = definition.scope.file.list_lines(function)
        # A parameter belongs to another function than its argument.
        is_inside = file == definition.scope.file.path and line in lines
        return values.compare(definition.name, lines if is_inside else ())

    def _define(self, node: ast.expr, use: _Use) -> Iterator[_Definition]:
        """Yield each definition of a name, attribute or call."""
        if isinstance(node, ast.Call) and name_called(node) == "getattr":
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant):
                found = self._attributes.get(str(name.value), ())
                yield from (_Definition(each.value, each.scope) for each in found)
        elif isinstance(node, ast.Call | ast.Subscript):
            yield from self._list_returned(node, use)
        elif isinstance(node, ast.Attribute):
            yield from self._list_attribute(node, use.scope)
        elif isinstance(node, ast.Name):
            yield from self._list_name(node.id, use.scope, use.line)

    def _list_name(self, name: str, scope: SourceScope, line: int) -> Iterator[_Definition]:
        function = scope.function
        if function is None and not self._has_modules:
            return
        body = function or scope.file.tree
        assigned = [
            (at, value)
            for at, value in list_assigned(body, name)
            if at < line and self._is_executed(scope.file, value)
        ]
        if assigned:
            # An augmented assignment, such as `x += 1`, also takes the value that was assigned before it.
            plain = [at for at, value in assigned if not is_augmented(scope.file, value)]
            for at, value in assigned:
                if at >= max(plain, default=0):
                    is_shown = not is_looped(scope.file, value)
                    yield _Definition(value, scope, is_shown, scope.key(value, name))
            stored = list_stored(body, name)
            yield from (_Definition(value, scope, is_member=is_member) for value, is_member in stored)
        elif function is not None and name in list_parameters(function):
            yield from self._list_arguments(name, function, scope)
        elif function is not None:
            outer = scope.file.function_of(function)
            # A function may use a name of its module that is assigned later than the function is defined.
            last = first_line(function) + 1 if outer is not None else sys.maxsize
            yield from self._list_name(name, SourceScope(scope.file, outer), last)

    def _list_arguments(self, name: str, function: Function, scope: SourceScope) -> Iterator[_Definition]:
        """Yield the arguments for a parameter in the known call of a function, or else in all calls by its name."""
        if isinstance(function, ast.Lambda):
            return
        owner, names = SourceScope(scope.file, function).find_class(), list_parameters(function)
        for call in self._list_calls(function, owner) if scope.call is None else [scope.call]:
            is_bound = owner is not None and names[:1] in (["self"], ["cls"], ["ctx"])
            value = find_argument(call.node, name, names[is_bound:])
            if value is not None:
                is_shown = isinstance(value, ast.Attribute) or scope.call is None
                key = (scope.file.path, function_line(function), name)
                yield _Definition(value, call.scope, is_shown, key)

    def _list_calls(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None
    ) -> list[SourceCall]:
        """Return the calls of a function of a class, if any, by its name."""
        if owner is not None and function.name == "__init__":
            return self._calls.get(owner.name, [])
        if owner is not None and function.name == "forward" and list_parameters(function)[:1] == ["ctx"]:
            applied = self._calls.get("apply", ())  # of an autograd function
            name = [owner.name, "apply"]
            return [each for each in applied if ast.unparse(each.node.func).split(".")[-2:] == name]
        return self._calls.get(function.name, [])

    def _list_attribute(self, node: ast.Attribute, scope: SourceScope) -> Iterator[_Definition]:
        """Yield the values assigned to an attribute, those of its class if that is known."""
        found = [
            each
            for each in self._attributes.get(node.attr, ())
            if self._is_executed(each.scope.file, each.value)
        ]
        own = scope.name_class(node.value)
        inside = [each for each in found if own and each.owner == own]
        is_all = all(isinstance(each.value, ast.Constant) for each in inside)
        for each in found if is_all else inside:
            yield _Definition(each.value, each.scope, name=each.scope.key(each.value, each.target))

    def _list_returned(self, node: ast.Call | ast.Subscript, use: _Use) -> Iterator[_Definition]:
        """Yield the values that a function of the user returns, if one executed function alone has its name."""
        func = node.func if isinstance(node, ast.Call) else None
        call = SourceCall(node, use.scope) if isinstance(node, ast.Call) else None
        found = {
            function: [_Definition(each, scope, name=scope.key(each, RETURNED)) for each in returns]
            for file, function in self._functions.get(name_called(node), ())
            if (returns := self._list_returns(file, function))
            and (scope := SourceScope(file, function, call))
        }
        own = use.scope.find_class()
        if len(found) > 1 and isinstance(func, ast.Attribute) and is_of_self(func) and own is not None:
            found = {function: each for function, each in found.items() if function in own.body}
        yield from next(iter(found.values())) if len(found) == 1 else ()

    def _list_returns(self, file: SourceFile, function: ast.AST) -> list[ast.expr]:
        """Return the values of the executed `return` statements of a function."""
        returns = (each for each in walk_own(function) if isinstance(each, ast.Return))
        return [each.value for each in returns if each.value is not None and self._is_executed(file, each)]

    @cached_property
    def _functions(self) -> dict[str, list[tuple[SourceFile, ast.FunctionDef | ast.AsyncFunctionDef]]]:
        found = defaultdict(list)
        for file in self._files.values():
            for node in ast.walk(file.tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[node.name].append((file, node))
        return found

    @cached_property
    def _calls(self) -> dict[str, list[SourceCall]]:
        found = defaultdict(list)
        for file in self._files.values():
            for node in ast.walk(file.tree):
                if isinstance(node, ast.Call):
                    found[name_called(node)].append(
                        SourceCall(node, SourceScope(file, file.function_of(node)))
                    )
        return found

    @cached_property
    def _attributes(self) -> dict[str, list[_Assigned]]:
        """Values that are assigned to attributes or passed as fields of classes, by name."""
        found = defaultdict(list)
        for file in self._files.values():
            for node in ast.walk(file.tree):
                for target, value in list_targets(node):
                    if isinstance(target, ast.Attribute):
                        scope = SourceScope(file, file.function_of(node))
                        owner = scope.name_class(target.value)
                        found[target.attr].append(_Assigned(value, scope, owner, ast.unparse(target)))
                if isinstance(node, ast.ClassDef):
                    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                    names = [each.id for each in fields if isinstance(each, ast.Name)]
                    for call in self._calls.get(node.name, ()):
                        given = {each.arg for each in call.node.keywords if each.arg is not None}
                        for name in (*names, *sorted(given.difference(names))):
                            if (passed := find_argument(call.node, name, names)) is not None:
                                found[name].append(_Assigned(passed, call.scope, node.name))
        return found
