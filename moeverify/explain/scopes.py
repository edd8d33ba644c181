"""Scopes: functions and modules of source code, in which names are looked up."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from moeverify.explain.program import Site
from moeverify.explain.python_values import Name
from moeverify.explain.syntax import Function, SourceFile, find_span


@dataclass(frozen=True, eq=False)
class SourceCall:
    """A call in a scope."""

    node: ast.Call
    scope: SourceScope


@dataclass(frozen=True, eq=False)
class SourceScope:
    """A function (None: a module) in which names are looked up, and the call that runs it, if known."""

    file: SourceFile
    function: Function | None
    call: SourceCall | None = None

    def site(self, node: ast.expr) -> Site:
        """Return the statement's line of an expression, with the expression as its span."""
        name = getattr(self.function, "name", "<lambda>") if self.function is not None else "<module>"
        parent = self.file.parents.get(node)
        shown = parent if isinstance(parent, ast.AugAssign) else node
        return Site(self.file.path, node.lineno, name, 0, find_span(shown))

    def key(self, node: ast.AST, name: str) -> Name | None:
        """Return the key under which the statement of a node is recorded to assign a name."""
        return (self.file.path, self.file.statement_line(node), name) if name else None

    def find_class(self) -> ast.ClassDef | None:
        """Return the class of a method, or None."""
        parent = self.file.parents.get(self.function) if self.function is not None else None
        return parent if isinstance(parent, ast.ClassDef) else None

    def name_class(self, owner: ast.expr) -> str:
        """Return the class of an object: that of `self` or `ctx`, or of an annotated parameter, or empty."""
        name, own = getattr(owner, "id", ""), self.find_class()
        if name in ("self", "ctx"):
            return own.name if own is not None else ""
        args = ast.walk(self.function.args) if self.function is not None else ()
        found = (each.annotation for each in args if isinstance(each, ast.arg) and each.arg == name)
        return str(getattr(next(found, None), "id", ""))
