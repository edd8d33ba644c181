"""The type of a mutation operator, and helpers for syntax trees that operators share."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

Rewrite = Callable[[ast.AST], Iterator[ast.AST]]
"""One way to break code: yields the replacements of a syntax tree node, one per mutant.

It yields new nodes and leaves the given one unchanged.
"""


def expression(text: str, **parts: ast.expr) -> ast.expr:
    """Return the tree of an expression, with each name of a part replaced by a copy of the part.

    Example: `expression("x + 1", x=node)` is the tree of that node plus one.
    """
    tree = ast.parse(text, mode="eval").body

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(parts[node.id]) if node.id in parts else node

    filled = Fill().visit(tree)
    assert isinstance(filled, ast.expr)
    return filled


def name_of_call(node: ast.AST) -> str:
    """Return the last name of a callee, such as `all_reduce` for `dist.all_reduce(x)`; "" for no call."""
    if not isinstance(node, ast.Call):
        return ""
    called = node.func
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def with_argument(call: ast.Call, index: int, value: ast.expr) -> ast.Call:
    """Return a copy of a call with another positional argument."""
    made = copy.deepcopy(call)
    made.args[index] = value
    return made


def with_name(call: ast.Call, name: str) -> ast.Call:
    """Return a copy of a call with another function of the same module or object."""
    made = copy.deepcopy(call)
    if isinstance(made.func, ast.Attribute):
        made.func.attr = name
    elif isinstance(made.func, ast.Name):
        made.func.id = name
    return made


def with_keyword(call: ast.Call, name: str, value: ast.expr) -> ast.Call:
    """Return a copy of a call with a keyword set."""
    made = copy.deepcopy(call)
    made.keywords = [each for each in made.keywords if each.arg != name]
    made.keywords.append(ast.keyword(name, value))
    return made
